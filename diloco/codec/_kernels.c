/* Whole blocks of the codecs fp16, int8, int4, e3m0, int2 and topk, to the bits of the eager definitions in scaled.py and
   topk.py, which say what a record is. Loops are plain, for the compiler to vectorise; every function that does blocks
   exists once for AVX2 and once for any machine, and the loader chooses. No sum may be reordered or fused: the build
   passes -ffp-contract=off. */

#include "_kernels.h"

enum { SHARE = 1 << 16 };

INLINED uint32_t largest(const float *x) {
    int32_t most = 0;
    for (int i = 0; i < BLOCK; i++) {
        int32_t u = (int32_t)size_of(x[i]);
        most = u > most ? u : most;
    }
    return (uint32_t)most;
}

/* -- int8, int4: scale (bf16), codes ------------------------------------------------------------------------------ */

INLINED float put_scale(uint8_t *out, uint32_t most, float reciprocal) {
    uint32_t scale = rounded_up(float_of(most) * reciprocal);
    scale = scale < TINY ? TINY : scale;
    put16(out, scale);
    return 1.0f / float_of(scale);
}

CLONED static int int8_encode(const float *x, uint8_t *out, int64_t blocks, int keep) {
    (void)keep;
    for (; blocks--; x += BLOCK, out += 2 + BLOCK) {
        uint32_t most = largest(x);
        if (most >= LIMIT) return 0;
        float inverse = put_scale(out, most, 1.0f / 127.0f);
        for (int i = 0; i < BLOCK; i++) out[2 + i] = (uint8_t)bits_of(x[i] * inverse + ROUND);
    }
    return 1;
}

CLONED static int int8_decode(float *x, const uint8_t *in, int64_t blocks, int keep) {
    (void)keep;
    for (; blocks--; x += BLOCK, in += 2 + BLOCK) {
        float scale;
        if (!get_scale(in, &scale)) return 0;
        for (int i = 0; i < BLOCK; i++) x[i] = (float)(int8_t)in[2 + i] * scale;
    }
    return 1;
}

CLONED static int int4_encode(const float *x, uint8_t *out, int64_t blocks, int keep) {
    (void)keep;
    for (; blocks--; x += BLOCK, out += 2 + BLOCK / 2) {
        uint32_t most = largest(x);
        if (most >= LIMIT) return 0;
        float inverse = put_scale(out, most, 1.0f / 7.0f);
        for (int i = 0; i < BLOCK / 2; i++) {
            uint32_t low = bits_of(x[i] * inverse + (ROUND + 8.0f)) & 15;
            uint32_t high = bits_of(x[i + BLOCK / 2] * inverse + (ROUND + 8.0f)) & 15;
            out[2 + i] = (uint8_t)(low | high << 4);
        }
    }
    return 1;
}

CLONED static int int4_decode(float *x, const uint8_t *in, int64_t blocks, int keep) {
    (void)keep;
    for (; blocks--; x += BLOCK, in += 2 + BLOCK / 2) {
        float scale;
        if (!get_scale(in, &scale)) return 0;
        for (int i = 0; i < BLOCK / 2; i++) x[i] = (float)((int32_t)(in[2 + i] & 15) - 8) * scale;
        for (int i = 0; i < BLOCK / 2; i++) x[i + BLOCK / 2] = (float)((int32_t)(in[2 + i] >> 4) - 8) * scale;
    }
    return 1;
}

/* -- e3m0: exponent, codes ----------------------------------------------------------------------------------------- */

INLINED uint32_t e3m0_code(float x, int32_t top) {
    int32_t u = (int32_t)size_of(x);
    int32_t level = ((u + (1 << 22)) >> 23) - top + 7, least = u >= (top - 7) << 23;
    return (uint32_t)(level > least ? level : least) | (bits_of(x) >> 28 & 8u);
}

INLINED float e3m0_value(uint32_t code, uint32_t base) {
    uint32_t level = code & 7u;
    return float_of((level ? (base + level) << 23 : 0u) | (code & 8u) << 28);
}

CLONED static int e3m0_encode(const float *x, uint8_t *out, int64_t blocks, int keep) {
    (void)keep;
    for (; blocks--; x += BLOCK, out += 1 + BLOCK / 2) {
        uint32_t most = largest(x);
        if (most >= LIMIT) return 0;
        int32_t top = (int32_t)((most + (1u << 22)) >> 23);
        top = top < 8 ? 8 : top;
        out[0] = (uint8_t)top;
        for (int i = 0; i < BLOCK / 2; i++)
            out[1 + i] = (uint8_t)(e3m0_code(x[i], top) | e3m0_code(x[i + BLOCK / 2], top) << 4);
    }
    return 1;
}

CLONED static int e3m0_decode(float *x, const uint8_t *in, int64_t blocks, int keep) {
    (void)keep;
    for (; blocks--; x += BLOCK, in += 1 + BLOCK / 2) {
        if (in[0] < 8 || in[0] > LIMIT >> 23) return 0;
        uint32_t base = in[0] - 7u;
        for (int i = 0; i < BLOCK / 2; i++) x[i] = e3m0_value(in[1 + i] & 15u, base);
        for (int i = 0; i < BLOCK / 2; i++) x[i + BLOCK / 2] = e3m0_value(in[1 + i] >> 4, base);
    }
    return 1;
}

/* -- fp16: exponent, halves ------------------------------------------------------------------------------------------ */

INLINED uint32_t half_of(float x) { /* for magnitudes below 2^15 */
    uint32_t u = size_of(x), low = bits_of(float_of(u) + 0.5f) - bits_of(0.5f);
    uint32_t normal = (u - (112u << 23) + 0xFFFu + (u >> 13 & 1u)) >> 13;
    return (u < 113u << 23 ? low : normal) | (bits_of(x) >> 16 & 0x8000u);
}

INLINED float float_of_half(uint32_t half) { /* for exponents below 31 */
    uint32_t u = (half & 0x7FFFu) << 13, sign = (half & 0x8000u) << 16;
    uint32_t low = bits_of(float_of(u + (113u << 23)) - float_of(113u << 23));
    return float_of((u < 1u << 23 ? low : u + (112u << 23)) | sign);
}

CLONED static int fp16_encode(const float *x, uint8_t *out, int64_t blocks, int keep) {
    (void)keep;
    for (; blocks--; x += BLOCK, out += 1 + 2 * BLOCK) {
        uint32_t most = largest(x);
        if (most >= LIMIT) return 0;
        int32_t exponent = (int32_t)(most >> 23) - (127 + 14);
        exponent = exponent < -102 ? -102 : exponent;
        out[0] = (uint8_t)(exponent + 102);
        float scale = float_of((uint32_t)(127 - exponent) << 23);
        uint16_t halves[BLOCK];
        for (int i = 0; i < BLOCK; i++) halves[i] = (uint16_t)half_of(x[i] * scale);
        memcpy(out + 1, halves, sizeof halves);
    }
    return 1;
}

CLONED static int fp16_decode(float *x, const uint8_t *in, int64_t blocks, int keep) {
    (void)keep;
    for (; blocks--; x += BLOCK, in += 1 + 2 * BLOCK) {
        uint16_t halves[BLOCK], most = 0;
        memcpy(halves, in + 1, sizeof halves);
        for (int i = 0; i < BLOCK; i++) {
            uint16_t size = halves[i] & 0x7FFFu;
            most = most > size ? most : size;
        }
        if (in[0] >= 102 + 118 - 14 || most >= 31 << 10) return 0;
        float scale = float_of((uint32_t)(127 - 102 + in[0]) << 23);
        for (int i = 0; i < BLOCK; i++) x[i] = float_of_half(halves[i]) * scale;
    }
    return 1;
}

/* -- int2: scale (bf16), codes ------------------------------------------------------------------------------------- */

INLINED float tree_sum(float *a, int width) { /* a power of two; destroys a */
    while (width > 1) {
        width /= 2;
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    }
    return a[0];
}

INLINED uint32_t int2_code(float x, float twice) {
    uint32_t negative = bits_of(x) >> 31, outer = float_of(size_of(x)) >= twice;
    return (outer ^ negative) | (negative ^ 1u) << 1;
}

CLONED static int int2_encode(const float *x, uint8_t *out, int64_t blocks, int keep) {
    (void)keep;
    for (; blocks--; x += BLOCK, out += 2 + BLOCK / 4) {
        float sums[BLOCK];
        if (largest(x) >= LIMIT) return 0;
        for (int i = 0; i < BLOCK; i++) sums[i] = float_of(size_of(x[i]));
        uint32_t scale = rounded_up(tree_sum(sums, BLOCK) * (0.625f / BLOCK));
        scale = scale < TINY ? 0 : scale;
        put16(out, scale);
        float twice = float_of(scale) + float_of(scale);
        for (int i = 0; i < BLOCK / 4; i++) {
            uint32_t code = int2_code(x[i], twice) | int2_code(x[i + BLOCK / 4], twice) << 2;
            code |= int2_code(x[i + BLOCK / 2], twice) << 4 | int2_code(x[i + 3 * BLOCK / 4], twice) << 6;
            out[2 + i] = (uint8_t)code;
        }
    }
    return 1;
}

CLONED static int int2_decode(float *x, const uint8_t *in, int64_t blocks, int keep) {
    (void)keep;
    for (; blocks--; x += BLOCK, in += 2 + BLOCK / 4) {
        uint32_t u = get16(in);
        if (u && (u < TINY || u > LIMIT)) return 0;
        float scale = float_of(u);
        for (int part = 0; part < 4; part++)
            for (int i = 0; i < BLOCK / 4; i++)
                x[part * BLOCK / 4 + i] = (float)((int32_t)(in[2 + i] >> 2 * part & 3) * 2 - 3) * scale;
    }
    return 1;
}

/* -- topk: two levels (bf16), indices of 12 bits, codes of 2 bits --------------------------------------------------- */

/* The k-th largest of n values of at least `low` and at most `high`, with the bits below `lowest` taken as 0. */
INLINED int32_t kth_largest(const int32_t *a, int n, int k, int32_t low, int32_t high, int lowest) {
    if (low == high) return low;
    int bit = 31 - __builtin_clz((uint32_t)(low ^ high));
    int32_t found = low >> bit >> 1 << bit << 1;
    for (; bit >= lowest; bit--) {
        int32_t wanted = found | (int32_t)1 << bit;
        int have = 0;
        for (int i = 0; i < n; i++) have += a[i] >= wanted;
        found = have >= k ? wanted : found;
    }
    return found;
}

/* Writes the indices of the `keep` largest magnitudes in ascending order, the lowest of equal ones; 0 for a value that
   is too large. The keep-th largest of the maxima of `groups` groups bounds the keep-th largest value from below, and
   few values are above it; among those it is searched exactly. */
INLINED int select_largest(const float *x, uint16_t *index, int keep, int groups) {
    int32_t most[512] = {0}, candidate[CHUNK];
    uint8_t above[CHUNK];
    uint16_t place[CHUNK];
    for (int row = 0; row < CHUNK; row += groups)
        for (int g = 0; g < groups; g++) {
            int32_t u = (int32_t)size_of(x[row + g]);
            most[g] = most[g] > u ? most[g] : u;
        }
    int32_t low = most[0], high = most[0];
    for (int g = 0; g < groups; g++) {
        low = low < most[g] ? low : most[g];
        high = high > most[g] ? high : most[g];
    }
    if ((uint32_t)high >= LIMIT) return 0;
    int32_t bound = kth_largest(most, groups, keep, low, high, 16);
    for (int i = 0; i < CHUNK; i++) above[i] = (int32_t)size_of(x[i]) >= bound;
    int count = 0;
    for (int word = 0; word < CHUNK / 8; word++) {
        uint64_t hits;
        if (word % 2 == 0) __builtin_prefetch(x + CHUNK + 8 * word); /* the next chunk, while this one is worked on */
        for (memcpy(&hits, above + 8 * word, 8); hits; hits &= hits - 1) {
            int i = 8 * word + __builtin_ctzll(hits) / 8;
            candidate[count] = (int32_t)size_of(x[i]);
            place[count++] = (uint16_t)i;
        }
    }
    int32_t last = kth_largest(candidate, count, keep, bound, high, 0);
    int ties = keep, kept = 0;
    for (int i = 0; i < count; i++) ties -= candidate[i] > last;
    for (int i = 0; i < count && kept < keep; i++) {
        int equal = candidate[i] == last;
        index[kept] = place[i];
        kept += candidate[i] > last || (equal && ties > 0);
        ties -= equal;
    }
    return 1;
}

INLINED void put_levels(uint8_t *out, const float *size, const uint8_t *above, int keep, int width) {
    for (int side = 0; side < 2; side++) {
        float sums[MOST];
        int count = 0;
        for (int i = 0; i < width; i++) {
            int of = i < keep && above[i] == side;
            sums[i] = of ? size[i] : 0.0f;
            count += of;
        }
        uint32_t level = rounded_up(tree_sum(sums, width) / (float)(count ? count : 1));
        put16(out + 2 * side, level < TINY ? 0 : level);
    }
}

INLINED int topk_record(int keep, int bits) { return (bits == 2 ? 4 : 2) + keep / 2 * 3 + keep * bits / 8; }

INLINED void put_signs(uint8_t *out, const float *x, const uint8_t *above, const uint16_t *index, int keep) {
    for (int i = 0; i < keep / 4; i++) {
        uint32_t code = 0;
        for (int part = 0; part < 4; part++) {
            int j = part * keep / 4 + i;
            code |= (above[j] | bits_of(x[index[j]]) >> 31 << 1) << 2 * part;
        }
        out[i] = (uint8_t)code;
    }
}

INLINED int topk_encode(const float *x, uint8_t *out, int64_t blocks, int keep, int bits) {
    int width = 1, shared = bits == 2 ? 4 : 2;
    while (width < keep) width *= 2;
    for (; blocks--; x += CHUNK, out += topk_record(keep, bits)) {
        uint16_t index[MOST + 1];
        float size[MOST] = {0}, sums[MOST], most = 0.0f;
        uint8_t above[MOST], *place = out + shared, *codes = place + keep / 2 * 3;
        int good = keep <= 64 ? select_largest(x, index, keep, 128) : select_largest(x, index, keep, 512);
        if (!good) return 0;
        for (int i = 0; i < keep; i++) size[i] = float_of(size_of(x[index[i]]));
        for (int i = 0; i < keep; i += 2, place += 3) {
            place[0] = (uint8_t)index[i];
            place[1] = (uint8_t)(index[i] >> 8 | (index[i + 1] & 15) << 4);
            place[2] = (uint8_t)(index[i + 1] >> 4);
        }
        if (bits == 8) {
            for (int i = 0; i < keep; i++) most = most > size[i] ? most : size[i];
            float inverse = put_scale(out, bits_of(most), 1.0f / 127.0f);
            for (int i = 0; i < keep; i++) codes[i] = (uint8_t)bits_of(x[index[i]] * inverse + ROUND);
        } else {
            memcpy(sums, size, sizeof sums);
            float mean = tree_sum(sums, width) * (1.0f / (float)keep);
            for (int i = 0; i < keep; i++) above[i] = size[i] > mean;
            put_levels(out, size, above, keep, width);
            put_signs(codes, x, above, index, keep);
        }
    }
    return 1;
}

INLINED int topk_decode(float *x, const uint8_t *in, int64_t blocks, int keep, int bits) {
    for (; blocks--; x += CHUNK, in += topk_record(keep, bits)) {
        const uint8_t *place = in + (bits == 2 ? 4 : 2), *codes = place + keep / 2 * 3;
        uint32_t level[2] = {get16(in), bits == 2 ? get16(in + 2) : 0};
        float scale = 0.0f;
        for (int side = 0; side < 2 && bits == 2; side++)
            if (level[side] && (level[side] < TINY || level[side] > LIMIT)) return 0;
        if (bits == 8 && !get_scale(in, &scale)) return 0;
        memset(x, 0, CHUNK * sizeof *x);
        int before = -1;
        for (int i = 0; i < keep; i++) {
            const uint8_t *three = place + i / 2 * 3;
            int at = i % 2 ? three[1] >> 4 | three[2] << 4 : three[0] | (three[1] & 15) << 8;
            if (at <= before) return 0;
            before = at;
            if (bits == 8) {
                x[at] = (float)(int8_t)codes[i] * scale;
            } else {
                uint32_t code = codes[i % (keep / 4)] >> 2 * (i / (keep / 4)) & 3u;
                x[at] = float_of(level[code & 1u] | (code & 2u) << 30);
            }
        }
    }
    return 1;
}

CLONED static int topk2_encode(const float *x, uint8_t *out, int64_t blocks, int keep) {
    return topk_encode(x, out, blocks, keep, 2);
}

CLONED static int topk8_encode(const float *x, uint8_t *out, int64_t blocks, int keep) {
    return topk_encode(x, out, blocks, keep, 8);
}

static int topk2_decode(float *x, const uint8_t *in, int64_t blocks, int keep) {
    return topk_decode(x, in, blocks, keep, 2);
}

static int topk8_decode(float *x, const uint8_t *in, int64_t blocks, int keep) {
    return topk_decode(x, in, blocks, keep, 8);
}

/* -- topk with the indices as one number -------------------------------------------------------------------------------- */

#include "_subsets.h"

INLINED int coded_record(int keep, int bits) { return (bits == 2 ? 4 : 2) + TABLES[keep].bytes + keep * bits / 8; }

/* Codes records one by one into a record of topk and from there. */
INLINED int coded_encode(const float *x, uint8_t *out, int64_t blocks, int keep, int bits) {
    int shared = bits == 2 ? 4 : 2, bytes = TABLES[keep].bytes;
    for (; blocks--; x += CHUNK, out += coded_record(keep, bits)) {
        uint8_t plain[4 + MOST / 2 * 3 + MOST];
        uint16_t index[NUMBERED];
        if (!topk_encode(x, plain, 1, keep, bits)) return 0;
        const uint8_t *three = plain + shared;
        for (int i = 0; i < keep; i += 2, three += 3) {
            index[i] = (uint16_t)(three[0] | (three[1] & 15) << 8);
            index[i + 1] = (uint16_t)(three[1] >> 4 | three[2] << 4);
        }
        memcpy(out, plain, (size_t)shared);
        put_number(out + shared, index, keep);
        memcpy(out + shared + bytes, three, (size_t)(keep * bits / 8));
    }
    return 1;
}

INLINED int coded_decode(float *x, const uint8_t *in, int64_t blocks, int keep, int bits) {
    int shared = bits == 2 ? 4 : 2, bytes = TABLES[keep].bytes;
    for (; blocks--; x += CHUNK, in += coded_record(keep, bits)) {
        uint8_t plain[4 + MOST / 2 * 3 + MOST], *three = plain + shared;
        uint16_t index[NUMBERED];
        if (!take_number(index, in + shared, keep)) return 0;
        for (int i = 0; i < keep; i += 2, three += 3) {
            three[0] = (uint8_t)index[i];
            three[1] = (uint8_t)(index[i] >> 8 | (index[i + 1] & 15) << 4);
            three[2] = (uint8_t)(index[i + 1] >> 4);
        }
        memcpy(plain, in, (size_t)shared);
        memcpy(three, in + shared + bytes, (size_t)(keep * bits / 8));
        if (!topk_decode(x, plain, 1, keep, bits)) return 0;
    }
    return 1;
}

CLONED static int coded2_encode(const float *x, uint8_t *out, int64_t blocks, int keep) {
    return coded_encode(x, out, blocks, keep, 2);
}

CLONED static int coded8_encode(const float *x, uint8_t *out, int64_t blocks, int keep) {
    return coded_encode(x, out, blocks, keep, 8);
}

static int coded2_decode(float *x, const uint8_t *in, int64_t blocks, int keep) {
    return coded_decode(x, in, blocks, keep, 2);
}

static int coded8_decode(float *x, const uint8_t *in, int64_t blocks, int keep) {
    return coded_decode(x, in, blocks, keep, 8);
}

/* -- threads, and the module ---------------------------------------------------------------------------------------- */

typedef struct {
    Encode *encode;
    Decode *decode;
    float *values;
    uint8_t *records;
    int64_t blocks;
    int keep, good;
} Job;

Encode *const ENCODE[] = {int8_encode, int4_encode,  e3m0_encode, int2_encode,
                                 fp16_encode, topk2_encode, topk8_encode, coded2_encode, coded8_encode};
Decode *const DECODE[] = {int8_decode, int4_decode,  e3m0_decode, int2_decode,
                                 fp16_decode, topk2_decode, topk8_decode, coded2_decode, coded8_decode};
static const int RECORD[] = {2 + BLOCK, 2 + BLOCK / 2, 1 + BLOCK / 2, 2 + BLOCK / 4, 1 + 2 * BLOCK};

int record_of(int kind, int keep) {
    if (kind < TOPK2) return RECORD[kind];
    int bits = kind == TOPK2 || kind == CODED2 ? 2 : 8;
    return kind < CODED2 ? topk_record(keep, bits) : coded_record(keep, bits);
}

int ready(int kind, int keep) {
    int most = kind >= CODED2 ? NUMBERED : MOST;
    if (kind < 0 || kind >= KINDS || (kind >= TOPK2 && (keep < 4 || keep > most || keep % 4))) {
        PyErr_SetString(PyExc_ValueError, "no such kernel");
        return 0;
    }
    if (kind >= CODED2 && !number_table(keep)) {
        PyErr_NoMemory();
        return 0;
    }
    return 1;
}

static void *work(void *argument) {
    Job *job = argument;
    job->good = job->encode ? job->encode(job->values, job->records, job->blocks, job->keep)
                            : job->decode(job->values, job->records, job->blocks, job->keep);
    return NULL;
}

/* Runs a job on up to `threads` threads, each with at least SHARE values; a thread that does not start is done here. */
static int run(Job whole, int kind, int threads) {
    Job jobs[THREADS];
    pthread_t ids[THREADS];
    int started[THREADS] = {0}, good = 1;
    int64_t block = block_of(kind), most = whole.blocks * block / SHARE;
    int record = record_of(kind, whole.keep);
    threads = threads > THREADS ? THREADS : threads;
    threads = threads > most ? (int)most : threads;
    threads = threads < 1 ? 1 : threads;
    for (int i = 0; i < threads; i++) {
        int64_t first = whole.blocks * i / threads;
        jobs[i] = whole;
        jobs[i].blocks = whole.blocks * (i + 1) / threads - first;
        jobs[i].values += first * block;
        jobs[i].records += first * record;
        if (i) started[i] = pthread_create(&ids[i], NULL, work, &jobs[i]) == 0;
    }
    for (int i = 0; i < threads; i++)
        if (!started[i]) work(&jobs[i]);
    for (int i = 0; i < threads; i++) {
        if (started[i]) pthread_join(ids[i], NULL);
        good &= jobs[i].good;
    }
    return good;
}

static PyObject *call(PyObject *arguments, int encode) {
    int kind, keep, threads, good;
    unsigned long long values, records;
    long long blocks;
    if (!PyArg_ParseTuple(arguments, "iKKLii", &kind, &values, &records, &blocks, &keep, &threads)) return NULL;
    if (!ready(kind, keep)) return NULL;
    if (blocks < 0) {
        PyErr_SetString(PyExc_ValueError, "no such kernel");
        return NULL;
    }
    Job job = {encode ? ENCODE[kind] : NULL, DECODE[kind], (float *)(uintptr_t)values,
               (uint8_t *)(uintptr_t)records, blocks, keep, 0};
    Py_BEGIN_ALLOW_THREADS
    good = run(job, kind, threads);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(good);
}

static PyObject *py_encode(PyObject *self, PyObject *arguments) { (void)self; return call(arguments, 1); }
static PyObject *py_decode(PyObject *self, PyObject *arguments) { (void)self; return call(arguments, 0); }

static PyMethodDef methods[] = {
    {"encode", py_encode, METH_VARARGS, "encode(kind, values, records, blocks, keep, threads) -> bool"},
    {"decode", py_decode, METH_VARARGS, "decode(kind, values, records, blocks, keep, threads) -> bool"},
    {"step", py_step, METH_VARARGS,
     "step(anchor, momentum, residual, update, numel, first, kind, keep, lr, mu, pieces, count, threads)"
     " -> (state, digest)"},
    {"digest", py_digest, METH_VARARGS, "digest(values, starts, runs, length, threads) -> int"},
    {"move", py_move, METH_VARARGS, "move(kind, anchor, out, payload, blocks, first, keep, threads) -> (bad, digest)"},
    {"copy", py_copy, METH_VARARGS, "copy(source, out, numel, threads) -> bool"},
    {"largest", py_largest, METH_VARARGS, "largest(kind, payload, blocks, keep, threads) -> bits, or -1"},
    {"sound", py_sound, METH_VARARGS, "sound(kind, payload, blocks, keep, threads) -> bool"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
