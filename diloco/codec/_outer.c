/* The outer step, the digest and the largest magnitude, each as one pass over blocks that stay in the cache; to the bits
   of the definitions in diloco/outer.py and diloco/digest.py. Where those say fused, a product and a sum are rounded once
   (fmaf), and nowhere else: the build passes -ffp-contract=off. */

#include "_kernels.h"

#include <math.h>
#include <stdatomic.h>

enum { FP32 = KINDS, BF16, TILE = 4096, TURN = 16 * TILE, DIMS = 8, WORDS = 9 + 2 * DIMS };
enum { GOOD, BAD_PAYLOAD, NO_CODES };

/* Every body below is compiled for machines with AVX2 and FMA, and for any machine. */
#if defined(__x86_64__) && defined(__GNUC__)
#define WITH_V3
#include <immintrin.h>
#define V3 __attribute__((target("avx2,fma")))
#endif

INLINED int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINED int kind_block(int kind) { return kind >= FP32 ? 1 : block_of(kind); }
INLINED int kind_record(int kind, int keep) { return kind >= FP32 ? (kind == FP32 ? 4 : 2) : record_of(kind, keep); }

/* -- pieces of contributions ---------------------------------------------------------------------------------------- */

/* One piece of a contribution: a payload of `numel` values, and the runs of `length` values in which they lie in the
   tensor. Run j begins at base + the sum of digit * stride, where the digits of j count in `size`, the last one fastest. */
typedef struct {
    const uint8_t *payload;
    const float *tail; /* the values behind the last whole block */
    int64_t numel, whole, base, length, dims;
    const int64_t *size, *stride;
    int kind, keep, block, record;
    float share;
} Piece;

INLINED int64_t run_start(const Piece *p, int64_t run) {
    int64_t at = p->base;
    for (int64_t d = p->dims - 1; d > 0; d--) {
        at += run % p->size[d] * p->stride[d];
        run /= p->size[d];
    }
    return p->dims ? at + run * p->stride[0] : at;
}

/* How many values of the piece lie before position `at` of the tensor. */
INLINED int64_t values_before(const Piece *p, int64_t at) {
    int64_t low = 0, high = p->numel / p->length; /* runs that begin before it */
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (run_start(p, middle) < at) low = middle + 1;
        else high = middle;
    }
    return low ? (low - 1) * p->length + min64(p->length, at - run_start(p, low - 1)) : 0;
}

INLINED float float_of_bf16(const uint8_t *in) { uint16_t u; memcpy(&u, in, 2); return float_of((uint32_t)u << 16); }

INLINED void add(float *sum, const float *x, int64_t count, float share) {
    for (int64_t i = 0; i < count; i++) sum[i] = fmaf(share, x[i], sum[i]);
}

INLINED int int8_add(float *sum, const uint8_t *in, int64_t blocks, float share) {
    for (; blocks--; sum += BLOCK, in += 2 + BLOCK) {
        float scale;
        if (!get_scale(in, &scale)) return 0;
        for (int i = 0; i < BLOCK; i++) sum[i] = fmaf(share, (float)(int8_t)in[2 + i] * scale, sum[i]);
    }
    return 1;
}

INLINED void fetch(const void *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const uint8_t *)from + at, 0, 2);
}

/* Adds values [from, to) of a piece. `held` is the block that `scratch` has, or -1. */
INLINED int add_values(const Piece *p, int64_t from, int64_t to, float *sum, float *scratch, int64_t *held) {
    if (p->kind == FP32) {
        const uint8_t *in = p->payload + 4 * from;
        for (int64_t i = 0; i < to - from; i++) {
            float x;
            memcpy(&x, in + 4 * i, 4);
            sum[i] = fmaf(p->share, x, sum[i]);
        }
        return 1;
    }
    if (p->kind == BF16) {
        const uint8_t *in = p->payload + 2 * from;
        for (int64_t i = 0; i < to - from; i++) sum[i] = fmaf(p->share, float_of_bf16(in + 2 * i), sum[i]);
        return 1;
    }
    while (from < to) {
        int64_t block = from / p->block, at = from - block * p->block, count = min64(p->block - at, to - from);
        const uint8_t *in = p->payload + block * p->record;
        if (block >= p->whole) {
            count = to - from;
            add(sum, p->tail + from - p->whole * p->block, count, p->share);
        } else if (count == p->block) {
            int64_t blocks = min64(min64((to - from) / p->block, p->whole - block), TILE / p->block);
            count = blocks * p->block;
            if (p->kind == INT8) {
                if (!int8_add(sum, in, blocks, p->share)) return 0;
            } else {
                if (!DECODE[p->kind](scratch, in, blocks, p->keep)) return 0;
                *held = -1;
                add(sum, scratch, count, p->share);
            }
        } else {
            if (*held != block && !DECODE[p->kind](scratch, in, 1, p->keep)) return 0;
            *held = block;
            add(sum, scratch + at, count, p->share);
        }
        from += count;
        sum += count;
    }
    return 1;
}

/* Adds what of a piece lies in [first, end) of the tensor to `sum`, which is that stretch. */
INLINED int add_piece(const Piece *p, int64_t first, int64_t end, float *sum, float *scratch) {
    int64_t from = values_before(p, first), to = values_before(p, end), held = -1;
    int64_t bytes = (to - from) / p->block * p->record; /* about as many come next */
    fetch(p->payload + from / p->block * p->record + bytes, bytes);
    while (from < to) {
        int64_t run = from / p->length, at = from - run * p->length, count = min64(p->length - at, to - from);
        if (!add_values(p, from, from + count, sum + run_start(p, run) + at - first, scratch, &held)) return 0;
        from += count;
    }
    return 1;
}

/* -- the outer step of one tensor ----------------------------------------------------------------------------------- */

typedef struct {
    float *anchor, *momentum, *residual;
    uint8_t *update;
    int64_t numel;
    float lr, mu;
    int kind, keep, count;
    uint32_t first; /* flat index of the tensor in its fragment */
    const Piece *pieces;
    _Atomic int64_t next;
    _Atomic int state;
    _Atomic uint64_t digest;
} Step;

INLINED uint32_t mix(uint32_t x, uint32_t multiplier) {
    x *= multiplier;
    return x ^ x >> 16;
}

INLINED uint64_t digest_of(const float *x, int64_t count, uint32_t first) {
    uint64_t low = 0;
    uint32_t high = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t h = mix(mix(bits_of(x[i]) + (first + (uint32_t)i) * 0x9E3779B9u, 0x85EBCA6Bu), 0xC2B2AE35u);
        low += h;
        high += mix(h, 0x27D4EB2Fu) - (h >> 31); /* h is signed */
    }
    return low + ((uint64_t)high << 32);
}

INLINED uint16_t bf16_of(float x) {
    uint32_t u = bits_of(x);
    return size_of(x) > 0x7F800000u ? 0x7FC0u : (uint16_t)((u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
}

/* Encodes `x` and decodes it again, over `applied`. */
INLINED int apply(const Step *s, const float *x, float *applied, uint8_t *out, int64_t count) {
    if (s->kind == FP32) {
        memcpy(out, x, 4 * (size_t)count);
        memcpy(applied, x, 4 * (size_t)count);
    } else if (s->kind == BF16) {
        for (int64_t i = 0; i < count; i++) {
            uint16_t u = bf16_of(x[i]);
            memcpy(out + 2 * i, &u, 2);
            applied[i] = float_of((uint32_t)u << 16);
        }
    } else {
        int64_t blocks = count / block_of(s->kind);
        return ENCODE[s->kind](x, out, blocks, s->keep) && DECODE[s->kind](applied, out, blocks, s->keep);
    }
    return 1;
}

INLINED int tile(const Step *s, int64_t first, int64_t count, uint64_t *digest) {
    float wanted[TILE], applied[TILE];
    float *a = s->anchor + first, *m = s->momentum + first, *r = s->residual + first, lr = s->lr, mu = s->mu;
    memset(wanted, 0, 4 * (size_t)count);
    for (int i = 0; i < s->count; i++) {
        int64_t begin = count * i / s->count, bytes = 4 * (count * (i + 1) / s->count - begin);
        fetch(a + begin, bytes);
        fetch(m + begin, bytes);
        fetch(r + begin, bytes);
        if (!add_piece(&s->pieces[i], first, first + count, wanted, applied)) return BAD_PAYLOAD;
    }
    for (int64_t i = 0; i < count; i++) {
        m[i] = mu * m[i] + wanted[i];
        wanted[i] = fmaf(mu, m[i], wanted[i]) * lr + r[i];
    }
    uint8_t *out = s->update + first / kind_block(s->kind) * kind_record(s->kind, s->keep);
    if (!apply(s, wanted, applied, out, count)) return NO_CODES;
    for (int64_t i = 0; i < count; i++) {
        r[i] = wanted[i] - applied[i];
        a[i] -= applied[i];
    }
    *digest += digest_of(a, count, s->first + (uint32_t)first);
    return GOOD;
}

INLINED void step_body(Step *s) {
    uint64_t digest = 0;
    for (int64_t turn; (turn = atomic_fetch_add(&s->next, TURN)) < s->numel;) {
        int64_t end = min64(turn + TURN, s->numel);
        for (int64_t first = turn; first < end; first += TILE) {
            int state = tile(s, first, min64(TILE, end - first), &digest);
            if (state != GOOD) {
                atomic_store(&s->state, state);
                return;
            }
        }
    }
    atomic_fetch_add(&s->digest, digest);
}

/* -- the digest of a box, and the largest magnitude of a payload ---------------------------------------------------- */

typedef struct {
    const float *values;
    int64_t numel, length;
    const int64_t *starts;
    _Atomic int64_t next;
    _Atomic uint64_t digest;
} Sum;

INLINED void sum_body(Sum *s) {
    uint64_t digest = 0;
    for (int64_t turn; (turn = atomic_fetch_add(&s->next, TURN)) < s->numel;)
        for (int64_t at = turn, end = min64(turn + TURN, s->numel); at < end;) {
            int64_t run = at / s->length, in = at - run * s->length, count = min64(s->length - in, end - at);
            digest += digest_of(s->values + at, count, (uint32_t)(s->starts[run] + in));
            at += count;
        }
    atomic_fetch_add(&s->digest, digest);
}

typedef struct {
    const uint8_t *payload;
    int64_t blocks;
    int kind, keep, quick; /* quick: whether the payload is good, and nothing about its values */
    _Atomic int64_t next;
    _Atomic int32_t most; /* -1 for a bad payload */
} Search;

/* Whether records decode: by the scale alone where every code has a value. */
INLINED int sound(const Search *s, const uint8_t *in, int64_t blocks, float *scratch) {
    int record = record_of(s->kind, s->keep), good = 1;
    if (s->kind > INT2) return DECODE[s->kind](scratch, in, blocks, s->keep);
    for (; blocks--; in += record) {
        float scale;
        int plain = get_scale(in, &scale), exponent = in[0] >= 8 && in[0] <= LIMIT >> 23;
        good &= s->kind == E3M0 ? exponent : plain | (s->kind == INT2 && get16(in) == 0);
    }
    return good;
}

INLINED int32_t most_of(const float *x, int64_t count, int32_t most) {
    for (int64_t i = 0; i < count; i++) {
        int32_t u = (int32_t)size_of(x[i]);
        most = u > most ? u : most;
    }
    return most;
}

INLINED void search_body(Search *s) {
    int64_t block = kind_block(s->kind), each = TILE / block, turn;
    int record = kind_record(s->kind, s->keep);
    int32_t most = 0;
    float x[TILE];
    while ((turn = atomic_fetch_add(&s->next, each)) < s->blocks) {
        int64_t blocks = min64(each, s->blocks - turn);
        const uint8_t *in = s->payload + turn * record;
        int good = 1;
        if (s->quick) {
            good = sound(s, in, blocks, x);
        } else if (s->kind == FP32) {
            memcpy(x, in, 4 * (size_t)blocks);
            most = most_of(x, blocks, most);
        } else if (s->kind == BF16) {
            for (int64_t i = 0; i < blocks; i++) x[i] = float_of_bf16(in + 2 * i);
            most = most_of(x, blocks, most);
        } else {
            good = DECODE[s->kind](x, in, blocks, s->keep);
            most = good ? most_of(x, blocks * block, most) : most;
        }
        if (!good) {
            atomic_store(&s->most, -1);
            return;
        }
    }
    for (int32_t before = atomic_load(&s->most); before >= 0 && before < most;)
        if (atomic_compare_exchange_weak(&s->most, &before, most)) break;
}

/* -- an anchor that moves, and a copy that is looked at ------------------------------------------------------------- */

/* Writes values past the cache: what they replace is not read, and what is written is too large to be found there. */
#ifdef WITH_V3
V3 static void stream(float *to, const float *from, int64_t count) {
    for (; count && ((uintptr_t)to & 31); count--) *to++ = *from++;
    for (; count >= 8; count -= 8, to += 8, from += 8) _mm256_stream_ps(to, _mm256_loadu_ps(from));
    while (count-- > 0) *to++ = *from++;
}
#endif
static void plain(float *to, const float *from, int64_t count) { memcpy(to, from, 4 * (size_t)count); }
typedef void Put(float *, const float *, int64_t);

typedef struct {
    const float *anchor;
    float *out;
    const uint8_t *payload;
    int64_t blocks;
    int kind, keep;
    uint32_t first; /* flat index in the fragment */
    _Atomic int64_t next;
    _Atomic int bad;
    _Atomic uint64_t digest;
} Move;

INLINED void move_body(Move *s, Put *put) {
    int64_t block = kind_block(s->kind), each = TILE / block, turn;
    int record = kind_record(s->kind, s->keep);
    uint64_t digest = 0;
    float x[TILE];
    while ((turn = atomic_fetch_add(&s->next, each)) < s->blocks) {
        int64_t blocks = min64(each, s->blocks - turn), count = blocks * block, at = turn * block;
        const uint8_t *in = s->payload + turn * record;
        const float *a = s->anchor + at;
        if (s->kind == FP32) {
            memcpy(x, in, 4 * (size_t)count);
        } else if (s->kind == BF16) {
            for (int64_t i = 0; i < count; i++) x[i] = float_of_bf16(in + 2 * i);
        } else if (!DECODE[s->kind](x, in, blocks, s->keep)) {
            atomic_store(&s->bad, 1);
            return;
        }
        for (int64_t i = 0; i < count; i++) x[i] = a[i] - x[i];
        digest += digest_of(x, count, s->first + (uint32_t)at);
        put(s->out + at, x, count);
    }
    atomic_fetch_add(&s->digest, digest);
}

typedef struct {
    const float *from;
    float *to;
    int64_t numel;
    _Atomic int64_t next;
    _Atomic int bad;
} Copy;

INLINED void copy_body(Copy *s, Put *put) {
    int32_t most = 0;
    for (int64_t at; (at = atomic_fetch_add(&s->next, TILE)) < s->numel;) {
        int64_t count = min64(TILE, s->numel - at);
        most = most_of(s->from + at, count, most);
        put(s->to + at, s->from + at, count);
    }
    if (most >= 0x7F800000) atomic_store(&s->bad, 1);
}

/* -- both machines -------------------------------------------------------------------------------------------------- */

static void *step_any(void *job) { step_body(job); return NULL; }
static void *sum_any(void *job) { sum_body(job); return NULL; }
static void *search_any(void *job) { search_body(job); return NULL; }
static void *move_any(void *job) { move_body(job, plain); return NULL; }
static void *copy_any(void *job) { copy_body(job, plain); return NULL; }
typedef void *Work(void *);
#ifdef WITH_V3
V3 static void *step_v3(void *job) { step_body(job); return NULL; }
V3 static void *sum_v3(void *job) { sum_body(job); return NULL; }
V3 static void *search_v3(void *job) { search_body(job); return NULL; }
V3 static void *move_v3(void *job) { move_body(job, stream); _mm_sfence(); return NULL; }
V3 static void *copy_v3(void *job) { copy_body(job, stream); _mm_sfence(); return NULL; }
#define CHOSEN(name) (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? name##_v3 : name##_any)
#else
#define CHOSEN(name) name##_any
#endif

/* Has up to `threads` threads work on a job of `numel` values, each on whatever comes next. */
static void together(Work *work, void *job, int64_t numel, int threads) {
    pthread_t ids[THREADS];
    int started = 0;
    threads = (int)min64(min64(threads, THREADS), numel / TURN);
    while (started < threads - 1 && !pthread_create(&ids[started], NULL, work, job)) started++;
    work(job);
    while (started) pthread_join(ids[--started], NULL);
}

/* -- the module ----------------------------------------------------------------------------------------------------- */

INLINED void *pointer(int64_t address) { return (void *)(uintptr_t)address; }
static int known(int kind, int keep) { return kind == FP32 || kind == BF16 || ready(kind, keep); }

static PyObject *refused(const char *why) {
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
}

static int read_piece(Piece *p, const int64_t *w) {
    *p = (Piece){.payload = pointer(w[0]), .tail = pointer(w[1]), .numel = w[2], .kind = (int)w[3], .keep = (int)w[4],
                 .share = float_of((uint32_t)w[5]), .base = w[6], .length = w[7], .dims = w[8],
                 .size = w + 9, .stride = w + 9 + DIMS};
    if (!known(p->kind, p->keep)) return 0;
    if (p->length < 1 || p->dims < 0 || p->dims > DIMS || p->numel % p->length) return refused("no such piece") != NULL;
    p->block = kind_block(p->kind);
    p->record = kind_record(p->kind, p->keep);
    p->whole = p->numel / p->block;
    return 1;
}

PyObject *py_step(PyObject *self, PyObject *arguments) {
    unsigned long long anchor, momentum, residual, update, words;
    long long numel, first;
    int kind, keep, count, threads;
    float lr, mu;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "KKKKLLiiffKii", &anchor, &momentum, &residual, &update, &numel, &first, &kind, &keep,
                          &lr, &mu, &words, &count, &threads))
        return NULL;
    if (!known(kind, keep)) return NULL;
    if (numel < 0 || numel % kind_block(kind) || count < 0) return refused("no such step");
    Piece *pieces = PyMem_Calloc((size_t)count + 1, sizeof *pieces);
    if (!pieces) return PyErr_NoMemory();
    for (int i = 0; i < count; i++)
        if (!read_piece(&pieces[i], (const int64_t *)pointer((int64_t)words) + (int64_t)i * WORDS)) {
            PyMem_Free(pieces);
            return NULL;
        }
    Step step = {.anchor = pointer((int64_t)anchor), .momentum = pointer((int64_t)momentum),
                 .residual = pointer((int64_t)residual), .update = pointer((int64_t)update), .numel = numel,
                 .lr = lr, .mu = mu, .kind = kind, .keep = keep, .count = count, .first = (uint32_t)first,
                 .pieces = pieces};
    Py_BEGIN_ALLOW_THREADS
    together(CHOSEN(step), &step, numel, threads);
    Py_END_ALLOW_THREADS
    PyMem_Free(pieces);
    return Py_BuildValue("iL", (int)step.state, (long long)step.digest);
}

PyObject *py_digest(PyObject *self, PyObject *arguments) {
    unsigned long long values, starts;
    long long runs, length;
    int threads;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "KKLLi", &values, &starts, &runs, &length, &threads)) return NULL;
    if (runs < 0 || length < 1) return refused("no such box");
    Sum sum = {.values = pointer((int64_t)values), .starts = pointer((int64_t)starts), .numel = runs * length,
               .length = length};
    Py_BEGIN_ALLOW_THREADS
    together(CHOSEN(sum), &sum, sum.numel, threads);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong((long long)sum.digest);
}

PyObject *py_move(PyObject *self, PyObject *arguments) {
    unsigned long long anchor, out, payload;
    long long blocks, first;
    int kind, keep, threads;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "iKKKLLii", &kind, &anchor, &out, &payload, &blocks, &first, &keep, &threads)) return NULL;
    if (!known(kind, keep)) return NULL;
    if (blocks < 0) return refused("no such payload");
    Move move = {.anchor = pointer((int64_t)anchor), .out = pointer((int64_t)out), .payload = pointer((int64_t)payload),
                 .blocks = blocks, .kind = kind, .keep = keep, .first = (uint32_t)first};
    Py_BEGIN_ALLOW_THREADS
    together(CHOSEN(move), &move, blocks * kind_block(kind), threads);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("iL", (int)move.bad, (long long)move.digest);
}

PyObject *py_copy(PyObject *self, PyObject *arguments) {
    unsigned long long from, to;
    long long numel;
    int threads;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "KKLi", &from, &to, &numel, &threads)) return NULL;
    Copy copy = {.from = pointer((int64_t)from), .to = pointer((int64_t)to), .numel = numel};
    Py_BEGIN_ALLOW_THREADS
    together(CHOSEN(copy), &copy, numel, threads);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!copy.bad);
}

static int search(PyObject *arguments, int quick, Search *s) {
    unsigned long long payload;
    long long blocks;
    int kind, keep, threads;
    if (!PyArg_ParseTuple(arguments, "iKLii", &kind, &payload, &blocks, &keep, &threads)) return 0;
    if (quick ? !ready(kind, keep) : !known(kind, keep)) return 0;
    if (blocks < 0) return refused("no such payload") != NULL;
    *s = (Search){.payload = pointer((int64_t)payload), .blocks = blocks, .kind = kind, .keep = keep, .quick = quick};
    Py_BEGIN_ALLOW_THREADS
    together(CHOSEN(search), s, blocks * kind_block(kind), threads);
    Py_END_ALLOW_THREADS
    return 1;
}

PyObject *py_largest(PyObject *self, PyObject *arguments) {
    Search s;
    (void)self;
    return search(arguments, 0, &s) ? PyLong_FromLong(s.most) : NULL;
}

PyObject *py_sound(PyObject *self, PyObject *arguments) {
    Search s;
    (void)self;
    return search(arguments, 1, &s) ? PyBool_FromLong(s.most >= 0) : NULL;
}
