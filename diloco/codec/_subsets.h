/* The indices of a chunk as one number, as subsets.py has it: the sum of C(i_j, j). Tables are made once, under the GIL,
   and never change. */

#include <math.h>
#include <stdlib.h>

enum { WORDS = 13, NUMBERED = 128 };
/* of[((j - 1) * CHUNK + i) * words]: C(i, j), low word first; log[(j - 1) * CHUNK + i]: its logarithm, or -1 for 0. Those
   of a j fit into the first cache, so that few of the numbers themselves are looked at. */
typedef struct { int words, bytes; uint64_t *of; float *log; } Table;
static Table TABLES[NUMBERED + 1];

static const uint64_t *binomial(const Table *table, int i, int j) {
    return table->of + ((int64_t)(j - 1) * CHUNK + i) * table->words;
}

static int add_words(uint64_t *a, const uint64_t *b, int words) {
    unsigned carry = 0;
    for (int w = 0; w < words; w++) {
        uint64_t sum = a[w] + b[w];
        unsigned over = sum < a[w];
        a[w] = sum + carry;
        carry = over | (a[w] < sum);
    }
    return (int)carry;
}

static void take_words(uint64_t *a, const uint64_t *b, int words) {
    unsigned borrow = 0;
    for (int w = 0; w < words; w++) {
        uint64_t left = a[w] - b[w];
        unsigned under = a[w] < b[w];
        a[w] = left - borrow;
        borrow = under | (left < borrow);
    }
}

static int at_most(const uint64_t *a, const uint64_t *b, int words) {
    while (--words)
        if (a[words] != b[words]) return a[words] < b[words];
    return a[0] <= b[0];
}

static float log_of(const uint64_t *a, int words) {
    while (words > 1 && !a[words - 1]) words--;
    double top = (double)a[words - 1] + (words > 1 ? (double)a[words - 2] * 0x1p-64 : 0.0);
    return top > 0.0 ? log2f((float)top) + (float)(64 * (words - 1)) : -1.0f;
}

/* Makes the table for `keep` of CHUNK, if there is none; 0 where there is no memory. C(n, k) is below (e n / k)^k. */
static int number_table(int keep) {
    static const uint64_t one[WORDS] = {1};
    Table *table = &TABLES[keep];
    if (table->of) return 1;
    int log = 31 - __builtin_clz((unsigned)keep), words = (int)(keep * (13.4427 - log)) / 64 + 1;
    words = words > WORDS ? WORDS : words;
    uint64_t *made = calloc((size_t)keep * CHUNK * (size_t)words, sizeof *made), most[WORDS] = {0};
    float *logs = malloc((size_t)keep * CHUNK * sizeof *logs);
    if (!made || !logs) {
        free(made);
        free(logs);
        return 0;
    }
    for (int j = 1; j <= keep; j++)
        for (int i = 1; i < CHUNK; i++) {
            uint64_t *here = made + ((int64_t)(j - 1) * CHUNK + i) * words;
            memcpy(here, here - words, (size_t)words * 8);
            add_words(here, j == 1 ? one : here - ((int64_t)CHUNK + 1) * words, words);
        }
    for (int64_t i = 0; i < (int64_t)keep * CHUNK; i++) logs[i] = log_of(made + i * words, words);
    for (int j = keep; j >= 1 && j >= keep - 1; j--) /* C(CHUNK, keep) - 1 is the largest number */
        add_words(most, made + ((int64_t)j * CHUNK - 1) * words, words);
    if (keep > 1) take_words(most, one, words);
    int bits = 64 * words;
    while (!(most[(bits - 1) / 64] >> (bits - 1) % 64 & 1)) bits--;
    table->bytes = (bits + 7) / 8;
    table->words = words;
    table->log = logs;
    table->of = made;
    return 1;
}

static void put_number(uint8_t *out, const uint16_t *index, int keep) {
    const Table *table = &TABLES[keep];
    uint64_t number[WORDS] = {0};
    for (int j = 1; j <= keep; j++) __builtin_prefetch(binomial(table, index[j - 1], j));
    for (int j = 1; j <= keep; j++) add_words(number, binomial(table, index[j - 1], j), table->words);
    memcpy(out, number, (size_t)table->bytes);
}

static int take_number(uint16_t *index, const uint8_t *in, int keep) {
    const Table *table = &TABLES[keep];
    uint64_t left[WORDS] = {0};
    memcpy(left, in, (size_t)table->bytes);
    int above = CHUNK;
    for (int j = keep; j >= 1; j--) {
        const float *log = table->log + (int64_t)(j - 1) * CHUNK, most = log_of(left, table->words);
        int low = j - 1, high = above; /* C(low, j) is 0 at first, so it is never above what is left */
        while (high - low > 1) {
            int middle = (low + high) / 2;
            if (log[middle] <= most) low = middle;
            else high = middle;
        }
        while (low > j - 1 && !at_most(binomial(table, low, j), left, table->words)) low--;
        while (low + 1 < above && at_most(binomial(table, low + 1, j), left, table->words)) low++;
        if (low >= above) return 0;
        index[j - 1] = (uint16_t)(above = low);
        take_words(left, binomial(table, low, j), table->words);
    }
    for (int w = 0; w < table->words; w++)
        if (left[w]) return 0;
    return 1;
}
