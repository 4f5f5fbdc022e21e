/* What the files of the kernels share: the bits of numbers, and the codecs by kind. */

#ifndef DILOCO_KERNELS_H
#define DILOCO_KERNELS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads are little-endian; the eager definitions serve this machine"
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define CLONED __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef CLONED
#define CLONED
#endif
#define INLINED static inline __attribute__((always_inline))

enum { BLOCK = 256, CHUNK = 4096, MOST = 256 };
#define TINY 0x00800000u                       /* 2^-126 */
#define LIMIT ((uint32_t)(127 + 118) << 23)    /* 2^118 */
#define ROUND 12582912.0f                      /* 1.5 * 2^23: adding it rounds to an integer, half to even */

INLINED uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINED float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINED uint32_t size_of(float x) { return bits_of(x) & 0x7FFFFFFFu; }
INLINED uint32_t rounded_up(float x) { return (bits_of(x) + 0xFFFFu) & 0xFFFF0000u; }
INLINED uint32_t get16(const uint8_t *p) { return ((uint32_t)p[0] | (uint32_t)p[1] << 8) << 16; }
INLINED void put16(uint8_t *p, uint32_t u) { p[0] = (uint8_t)(u >> 16); p[1] = (uint8_t)(u >> 24); }

/* The scale (bf16) at the head of a record; 0 where it is out of range. */
INLINED int get_scale(const uint8_t *in, float *scale) {
    uint32_t u = get16(in);
    *scale = float_of(u);
    return u >= TINY && u <= LIMIT;
}

typedef int Encode(const float *, uint8_t *, int64_t, int);
typedef int Decode(float *, const uint8_t *, int64_t, int);
#define HIDDEN __attribute__((visibility("hidden")))
enum { INT8, INT4, E3M0, INT2, FP16, TOPK2, TOPK8, CODED2, CODED8, KINDS };
enum { THREADS = 64 };

HIDDEN extern Encode *const ENCODE[];
HIDDEN extern Decode *const DECODE[];

INLINED int block_of(int kind) { return kind >= TOPK2 ? CHUNK : BLOCK; }
/* Bytes of a record. */
HIDDEN int record_of(int kind, int keep);
/* Whether there is such a kernel, which is ready to be used after; with an exception set where there is not. */
HIDDEN int ready(int kind, int keep);

HIDDEN PyObject *py_step(PyObject *, PyObject *);
HIDDEN PyObject *py_digest(PyObject *, PyObject *);
HIDDEN PyObject *py_move(PyObject *, PyObject *);
HIDDEN PyObject *py_copy(PyObject *, PyObject *);
HIDDEN PyObject *py_largest(PyObject *, PyObject *);
HIDDEN PyObject *py_sound(PyObject *, PyObject *);

#endif
