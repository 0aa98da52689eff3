/*
 * tw_dot.h - the matrix product of generated kernels:  C[i,j] += sum_k A[i,k] * B[j,k]
 *
 * One accumulation order. The bits of C[i,j] are a function of the values A[i,:], B[j,:], C[i,j] and of K alone:
 *
 *     for each chunk of TW_DOT_KC values of k, in ascending order:
 *         lane[l] = 0;  for k in the chunk, ascending:  lane[k % 8] = fma(A[i,k], B[j,k], lane[k % 8])
 *         s[l] = lane[l] + lane[l+4] (l<4);  t[l] = s[l] + s[l+2] (l<2);  C[i,j] += t[0] + t[1]
 *
 * (the last chunk is filled with zeros to a multiple of 16). Every code path below goes through tw_dot_block_, which
 * does just this for a block of rows and columns; blocking, packing and storage type change where operands are read
 * from, never the order. bf16 converts to fp32 exactly, so it gives the bits of the same values held in fp32. Only the
 * payload of a NaN is left open. All machines with a fused multiply-add agree; one without has bits of its own.
 *
 * Why this order: k is contiguous in both operands of the main case (activations [rows, K], weights [N, K]), so
 * vectors along k need no transposition, and a product of a few rows can stream the weights straight from memory.
 * The price is one tree of shuffles per block and chunk, 1/20 of the work at most and mostly hidden behind the next
 * block's multiplications. Chunks of 1024 measured no better, and would hold half as many rows of A in L2.
 */
#ifndef TW_DOT_H
#define TW_DOT_H

#include <stdint.h>
#include <string.h>

#ifdef __FAST_MATH__
#error "tw_dot.h needs IEEE arithmetic: -ffast-math would let the compiler reorder sums"
#endif

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors wider than the target's cross inlined functions only */

#ifndef TW_F32
#define TW_F32 0
#define TW_BF16 1
#endif

/* k_major == 0: element (row r, k) at data[r*ld + k];  k_major == 1: at data[k*ld + r].  ld counts elements. */
typedef struct {
    const void *data;
    int64_t ld;
    int32_t dtype; /* TW_F32, or TW_BF16 held as uint16_t */
    int32_t k_major;
} tw_operand;

#define TW_DOT_KC 512  /* values of k per chunk: part of the accumulation order */
#define TW_DOT_STEP 16 /* values of k per loop iteration: chunks are zero filled to a multiple */
#define TW_DOT_MB 64   /* rows of A packed at a time: 64 x 512 floats stay in L2 beside what streams through it */
#define TW_DOT_NB 16   /* most columns of B packed at a time */
#define TW_DOT_BLD (TW_DOT_KC + 16) /* stride of a packed column: off a power of two, against cache set conflicts */
#define TW_DOT_APACK (TW_DOT_MB * TW_DOT_KC)
#define TW_DOT_SCRATCH (TW_DOT_APACK + TW_DOT_NB * TW_DOT_BLD) /* floats of scratch, 64-byte aligned */

#define TW_DOT_OUTLINE static __attribute__((noinline, unused))
#define TW_DOT_INLINE static inline __attribute__((always_inline, unused))

typedef float tw_v8_ __attribute__((vector_size(32)));
typedef float tw_v4_ __attribute__((vector_size(16)));
typedef float tw_v8u_ __attribute__((vector_size(32), aligned(4), may_alias));
typedef float tw_v4u_ __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t tw_u8_ __attribute__((vector_size(32)));
typedef uint32_t tw_u4_ __attribute__((vector_size(16)));
typedef uint16_t tw_h4u_ __attribute__((vector_size(8), aligned(2), may_alias));
typedef uint16_t tw_h8u_ __attribute__((vector_size(16), aligned(2), may_alias));

/*
 * The one multiply-add, acc = a * b + acc: an instruction where the target has one, so that no contraction setting can
 * alter the bits; elsewhere the same expression everywhere.
 */
#if defined(__FMA__) && defined(__x86_64__)
#define TW_DOT_FMA(acc, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b))
/*
 * The 3 x 4 inner step written out. It needs all sixteen registers, and gcc 12 spills accumulators in the loop from
 * every C form tried. Operands in L1, of 92 GFLOP/s: this 88, multiply-adds as above 80, vector expressions 43.
 */
#define TW_DOT_COLUMN_(at, col, c0, c1, c2)          \
    "vmovups " at "(%[" col "],%[k],4), %%ymm15\n\t" \
    "vfmadd231ps %%ymm15, %%ymm12, %[" c0 "]\n\t"    \
    "vfmadd231ps %%ymm15, %%ymm13, %[" c1 "]\n\t"    \
    "vfmadd231ps %%ymm15, %%ymm14, %[" c2 "]\n\t"
#define TW_DOT_HALF_(at, x0, x1, x2)              \
    "vmovups " x0 "(%[a]), %%ymm12\n\t"           \
    "vmovups " x1 "(%[a]), %%ymm13\n\t"           \
    "vmovups " x2 "(%[a]), %%ymm14\n\t"           \
    TW_DOT_COLUMN_(at, "b0", "c00", "c10", "c20") \
    TW_DOT_COLUMN_(at, "b1", "c01", "c11", "c21") \
    TW_DOT_COLUMN_(at, "b2", "c02", "c12", "c22") \
    TW_DOT_COLUMN_(at, "b3", "c03", "c13", "c23")
#define TW_DOT_STEP_3X4(acc, pa, pb, at)                                                                            \
    __asm__ volatile(TW_DOT_HALF_("", "", "32", "64") TW_DOT_HALF_("32", "96", "128", "160")                        \
                     : [c00] "+x"(acc[0][0]), [c01] "+x"(acc[0][1]), [c02] "+x"(acc[0][2]), [c03] "+x"(acc[0][3]),  \
                       [c10] "+x"(acc[1][0]), [c11] "+x"(acc[1][1]), [c12] "+x"(acc[1][2]), [c13] "+x"(acc[1][3]),  \
                       [c20] "+x"(acc[2][0]), [c21] "+x"(acc[2][1]), [c22] "+x"(acc[2][2]), [c23] "+x"(acc[2][3])   \
                     : [a] "r"(pa), [b0] "r"(pb[0]), [b1] "r"(pb[1]), [b2] "r"(pb[2]), [b3] "r"(pb[3]), [k] "r"(at) \
                     : "xmm12", "xmm13", "xmm14", "xmm15", "memory")
/* The whole chunk likewise, for many rows: fewer instructions per step, which shows where a core is shared. */
#define TW_DOT_CHUNK_3X4(acc, pa, pb, kc)                                                                           \
    do {                                                                                                            \
        const float *pa_ = (pa);                                                                                    \
        int64_t k_ = 0;                                                                                             \
        __asm__ volatile(                                                                                           \
            "vxorps %[c00], %[c00], %[c00]\n\t vxorps %[c01], %[c01], %[c01]\n\t vxorps %[c02], %[c02], %[c02]\n\t" \
            "vxorps %[c03], %[c03], %[c03]\n\t vxorps %[c10], %[c10], %[c10]\n\t vxorps %[c11], %[c11], %[c11]\n\t" \
            "vxorps %[c12], %[c12], %[c12]\n\t vxorps %[c13], %[c13], %[c13]\n\t vxorps %[c20], %[c20], %[c20]\n\t" \
            "vxorps %[c21], %[c21], %[c21]\n\t vxorps %[c22], %[c22], %[c22]\n\t vxorps %[c23], %[c23], %[c23]\n\t" \
            ".p2align 5\n1:\n\t" TW_DOT_HALF_("", "", "32", "64") TW_DOT_HALF_("32", "96", "128", "160")            \
            "add $192, %[a]\n\t add $16, %[k]\n\t cmp %[n], %[k]\n\t jl 1b\n\t"                                     \
            : [c00] "=&x"(acc[0][0]), [c01] "=&x"(acc[0][1]), [c02] "=&x"(acc[0][2]), [c03] "=&x"(acc[0][3]),       \
              [c10] "=&x"(acc[1][0]), [c11] "=&x"(acc[1][1]), [c12] "=&x"(acc[1][2]), [c13] "=&x"(acc[1][3]),       \
              [c20] "=&x"(acc[2][0]), [c21] "=&x"(acc[2][1]), [c22] "=&x"(acc[2][2]), [c23] "=&x"(acc[2][3]),       \
              [a] "+&r"(pa_), [k] "+&r"(k_)                                                                         \
            : [b0] "r"(pb[0]), [b1] "r"(pb[1]), [b2] "r"(pb[2]), [b3] "r"(pb[3]), [n] "r"(kc)                       \
            : "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory");                                                  \
    } while (0)
#else
#define TW_DOT_FMA(acc, a, b) ((acc) = (a) * (b) + (acc))
#endif

TW_DOT_INLINE tw_v8_ tw_dot_load_(const void *p, int bf16) {
    if (!bf16) return *(const tw_v8u_ *)p;
    tw_u8_ wide;
#ifdef __AVX2__ /* one instruction, where gcc 12 makes five of the conversion */
    __asm__("vpmovzxwd %1, %0" : "=x"(wide) : "m"(*(const tw_h8u_ *)p));
#else
    wide = __builtin_convertvector(*(const tw_h8u_ *)p, tw_u8_);
#endif
    return (tw_v8_)(wide << 16);
}

TW_DOT_INLINE float tw_dot_load1_(const void *p, int64_t at, int bf16) {
    if (!bf16) return ((const float *)p)[at];
    uint32_t wide = (uint32_t)((const uint16_t *)p)[at] << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* One row's four lane vectors to the t of the order above: {x0.t0 x0.t1 x2.t0 x2.t1 x1.t0 x1.t1 x3.t0 x3.t1} */
TW_DOT_INLINE tw_v8_ tw_dot_tree_(const tw_v8_ x[4]) {
    const tw_v8_ x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
    tw_v8_ s01 = __builtin_shufflevector(x0, x1, 0, 1, 2, 3, 8, 9, 10, 11) +
                 __builtin_shufflevector(x0, x1, 4, 5, 6, 7, 12, 13, 14, 15);
    tw_v8_ s23 = __builtin_shufflevector(x2, x3, 0, 1, 2, 3, 8, 9, 10, 11) +
                 __builtin_shufflevector(x2, x3, 4, 5, 6, 7, 12, 13, 14, 15);
    return __builtin_shufflevector(s01, s23, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(s01, s23, 2, 3, 10, 11, 6, 7, 14, 15);
}

TW_DOT_INLINE void tw_dot_add_(float *c, tw_v4_ sum, int cols, int64_t apart) {
    if (cols == 4 && apart == 1) {
        *(tw_v4u_ *)c += sum;
    } else {
        for (int j = 0; j < cols; j++) c[j * apart] += sum[j];
    }
}

/* What the next step will read of B, fetched while this one computes: four column starts, and bytes per iteration. */
typedef struct {
    const char *col[4];
    int64_t step;
} tw_dot_ahead_;

/*
 * rows x 4 elements of C over one chunk. a: packed [kc/8][rows][8]; b: four columns. cols < 4 adds only the first ones.
 * 3 x 4: twelve accumulators cover the latency of two FMA pipes, 7 loads feed 12 multiplications.
 */
TW_DOT_INLINE void tw_dot_block_(int rows, int bf16, int fetch, int64_t kc, const float *a, const void *const b[4],
                                 int cols, float *c, int64_t ldc, int64_t apart, const tw_dot_ahead_ *ahead) {
    const int64_t size = bf16 ? 2 : 4;
    const char *const bj[4] = {b[0], b[1], b[2], b[3]};
    const char *p0 = ahead->col[0], *p1 = ahead->col[1], *p2 = ahead->col[2], *p3 = ahead->col[3];
    const int64_t pstep = ahead->step;
    tw_v8_ acc[3][4] = {{{0}}};
    int64_t poff = 0;
    int64_t k = 0;
#ifdef TW_DOT_CHUNK_3X4
    if (rows == 3 && !bf16 && !fetch) {
        TW_DOT_CHUNK_3X4(acc, a, bj, kc);
        k = kc;
    }
#endif
    for (; k < kc; k += TW_DOT_STEP) {
        if (fetch) {
            __builtin_prefetch(p0 + poff);
            __builtin_prefetch(p1 + poff);
            __builtin_prefetch(p2 + poff);
            __builtin_prefetch(p3 + poff);
            poff += pstep;
        }
#ifdef TW_DOT_STEP_3X4
        if (rows == 3 && !bf16) {
            TW_DOT_STEP_3X4(acc, a + k * 3, bj, k);
            continue;
        }
#endif
#pragma GCC unroll 2
        for (int h = 0; h < TW_DOT_STEP; h += 8) {
            tw_v8_ x[3];
#pragma GCC unroll 3
            for (int r = 0; r < rows; r++) x[r] = *(const tw_v8u_ *)(a + (k + h) * rows + r * 8);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const tw_v8_ y = tw_dot_load_(bj[j] + (k + h) * size, bf16);
#pragma GCC unroll 3
                for (int r = 0; r < rows; r++) TW_DOT_FMA(acc[r][j], x[r], y);
            }
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < rows; r += 2) {
        int q = r + 1 < rows ? r + 1 : r;
        tw_v8_ t = tw_dot_tree_(acc[r]);
        tw_v8_ u = q == r ? t : tw_dot_tree_(acc[q]);
        tw_v8_ sum = __builtin_shufflevector(t, u, 0, 2, 8, 10, 4, 6, 12, 14) +
                     __builtin_shufflevector(t, u, 1, 3, 9, 11, 5, 7, 13, 15); /* {t0 t2 u0 u2 | t1 t3 u1 u3} */
        tw_dot_add_(c + r * ldc, __builtin_shufflevector(sum, sum, 0, 4, 1, 5), cols, apart);
        if (q != r) tw_dot_add_(c + q * ldc, __builtin_shufflevector(sum, sum, 2, 6, 3, 7), cols, apart);
    }
}

/* Rows of the next block out of `left`: threes, and no lone last row unless there is only one. */
TW_DOT_INLINE int tw_dot_rows_(int64_t left) { return left == 4 || left == 2 ? 2 : left == 1 ? 1 : 3; }

/* Four values of one k, of rows side by side. */
TW_DOT_INLINE tw_v4_ tw_dot_load4_(const void *p, int bf16) {
    if (!bf16) return *(const tw_v4u_ *)p;
    return (tw_v4_)(__builtin_convertvector(*(const tw_h4u_ *)p, tw_u4_) << 16);
}

/* 8 values of k of four neighbouring rows of a k_major operand, turned. */
TW_DOT_INLINE void tw_dot_turn_(const char *from, int64_t ld, int bf16, float *to, int64_t stride_r) {
    for (int h = 0; h < 8; h += 4) {
        tw_v4_ x[4];
        for (int k = 0; k < 4; k++) x[k] = tw_dot_load4_(from + (h + k) * ld * (bf16 ? 2 : 4), bf16);
        const tw_v4_ l01 = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5);
        const tw_v4_ h01 = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
        const tw_v4_ l23 = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
        const tw_v4_ h23 = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
        *(tw_v4u_ *)(to + h) = __builtin_shufflevector(l01, l23, 0, 1, 4, 5);
        *(tw_v4u_ *)(to + h + stride_r) = __builtin_shufflevector(l01, l23, 2, 3, 6, 7);
        *(tw_v4u_ *)(to + h + 2 * stride_r) = __builtin_shufflevector(h01, h23, 0, 1, 4, 5);
        *(tw_v4u_ *)(to + h + 3 * stride_r) = __builtin_shufflevector(h01, h23, 2, 3, 6, 7);
    }
}

TW_DOT_INLINE int64_t tw_dot_padded_(int64_t kc) { return (kc + TW_DOT_STEP - 1) / TW_DOT_STEP * TW_DOT_STEP; }

/* Rows [row, row+rows) of an operand over k in [k0, k0+kc) as out[r*stride_r + (k/8)*stride_k + k%8]: fp32, and zeros
   up to the padded length. */
TW_DOT_OUTLINE void tw_dot_pack_(tw_operand x, int64_t row, int64_t rows, int64_t k0, int64_t kc, float *out,
                                 int64_t stride_r, int64_t stride_k) {
    const int bf16 = x.dtype == TW_BF16;
    const int64_t size = bf16 ? 2 : 4, padded = tw_dot_padded_(kc);
    const int64_t turned = x.k_major ? rows / 4 * 4 : 0;
    for (int64_t k = 0; turned && k + 8 <= kc; k += 8) {
        for (int64_t r = 0; r < turned; r += 4) {
            const char *from = (const char *)x.data + ((k0 + k) * x.ld + row + r) * size;
            float *to = out + r * stride_r + k / 8 * stride_k;
            if (bf16) tw_dot_turn_(from, x.ld, 1, to, stride_r);
            else tw_dot_turn_(from, x.ld, 0, to, stride_r);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        float *to = out + r * stride_r;
        int64_t k = r < turned ? kc / 8 * 8 : 0;
        if (!x.k_major) {
            const char *from = (const char *)x.data + ((row + r) * x.ld + k0) * size;
            if (bf16)
                for (; k + 8 <= kc; k += 8) *(tw_v8u_ *)(to + k / 8 * stride_k) = tw_dot_load_(from + k * 2, 1);
            else
                for (; k + 8 <= kc; k += 8) *(tw_v8u_ *)(to + k / 8 * stride_k) = tw_dot_load_(from + k * 4, 0);
        }
        const int64_t step = x.k_major ? x.ld : 1;
        const int64_t at = x.k_major ? k0 * x.ld + row + r : (row + r) * x.ld + k0;
        for (; k < padded; k++)
            to[k / 8 * stride_k + k % 8] = k < kc ? tw_dot_load1_(x.data, at + k * step, bf16) : 0.0f;
    }
}

/* All packed rows of A against four columns of B, one chunk. */
TW_DOT_OUTLINE void tw_dot_column_(int64_t m, int64_t kc, const float *a, const void *const b[4], int bf16, int cols,
                                   float *c, int64_t ldc, int64_t apart, tw_dot_ahead_ ahead) {
    const int few = m <= 24; /* few rows wait for memory and fetch evenly in the loop; many fetch between blocks */
    const int64_t even = ahead.step * (kc / TW_DOT_STEP), share = few ? even : (even + 63) & -64;
    for (int64_t i = 0; i < m;) {
        const int rows = tw_dot_rows_(m - i);
        const float *ai = a + i * kc;
        float *ci = c + i * ldc;
        if (bf16) {
            if (rows == 3) tw_dot_block_(3, 1, 1, kc, ai, b, cols, ci, ldc, apart, &ahead);
            else if (rows == 2) tw_dot_block_(2, 1, 1, kc, ai, b, cols, ci, ldc, apart, &ahead);
            else tw_dot_block_(1, 1, 1, kc, ai, b, cols, ci, ldc, apart, &ahead);
        } else if (few) {
            if (rows == 3) tw_dot_block_(3, 0, 1, kc, ai, b, cols, ci, ldc, apart, &ahead);
            else if (rows == 2) tw_dot_block_(2, 0, 1, kc, ai, b, cols, ci, ldc, apart, &ahead);
            else tw_dot_block_(1, 0, 1, kc, ai, b, cols, ci, ldc, apart, &ahead);
        } else {
            for (int q = 0; q < 4; q++)
                for (int64_t at = 0; at < share; at += 64) __builtin_prefetch(ahead.col[q] + at);
            if (rows == 3) tw_dot_block_(3, 0, 0, kc, ai, b, cols, ci, ldc, apart, &ahead);
            else tw_dot_block_(2, 0, 0, kc, ai, b, cols, ci, ldc, apart, &ahead);
        }
        for (int q = 0; q < 4; q++) ahead.col[q] += share;
        i += rows;
    }
}

/* Packed rows of A (m of them, one chunk) against columns [j0, j0+n) of B; n <= 4, or <= TW_DOT_NB if B is k_major.
   With `apart` > 1 the columns are instead the four from j0/4 on that lie `apart` from each other. */
TW_DOT_INLINE void tw_dot_columns_(int64_t m, int64_t N, int64_t j0, int64_t n, int64_t k, int64_t kc, const float *a,
                                   tw_operand b, int64_t apart, float *c, int64_t ldc, float *bpack) {
    const int bf16 = b.dtype == TW_BF16;
    const int64_t size = bf16 ? 2 : 4, padded = tw_dot_padded_(kc);
    /* Read in place where rows of B are vectors as they lie; bf16 is worth converting once many rows use it. */
    const int direct = !b.k_major && kc == padded && !(bf16 && m > 8);
    const int64_t first = apart > 1 ? j0 / 4 : j0;
    if (!direct) tw_dot_pack_(b, j0, n, k, kc, bpack, TW_DOT_BLD, 8);
    for (int64_t j = 0; j < n; j += 4) {
        const int cols = n - j < 4 ? (int)(n - j) : 4;
        const void *col[4];
        tw_dot_ahead_ ahead;
        ahead.step = b.k_major ? 0 : TW_DOT_STEP * size / ((m + 2) / 3); /* one chunk over all blocks of rows */
        for (int q = 0; q < 4; q++) {
            const int64_t jq = j + (q < cols ? q : cols - 1) * apart; /* columns past the edge: the last again, never added */
            const int64_t next = apart > 1 ? first + q * apart + (first + 1 < apart) : first + n + q;
            const int64_t ja = next < N ? next : N - 1;
            col[q] = direct ? (const char *)b.data + ((first + jq) * b.ld + k) * size
                            : (const char *)(bpack + jq * TW_DOT_BLD);
            ahead.col[q] = b.k_major ? (const char *)col[q] : (const char *)b.data + (ja * b.ld + k) * size;
        }
        tw_dot_column_(m, padded, a, col, bf16 && direct, cols, c + first + j, ldc, apart, ahead);
    }
}

/* C[i*ldc + j] += sum_k A(i, k) * B(j, k) for i < M, j < N. scratch: TW_DOT_SCRATCH floats, 64-byte aligned. */
static __attribute__((unused)) void tw_dot(int64_t M, int64_t N, int64_t K, tw_operand a, tw_operand b, float *c,
                                           int64_t ldc, float *scratch) {
    if (M <= 0 || N <= 0 || K <= 0) return;
    float *apack = scratch, *bpack = scratch + TW_DOT_APACK;
    const int64_t parts = (M + TW_DOT_MB - 1) / TW_DOT_MB, mb = (M + parts - 1) / parts; /* even parts of the rows */
    const int64_t kb = TW_DOT_APACK / (mb * TW_DOT_KC) * TW_DOT_KC; /* as many chunks as fit: few rows go on along k */
    const int64_t nb = b.k_major ? TW_DOT_NB : 4;
    /* Few rows wait for memory, which is fetched ahead best along long streams: their four columns lie a quarter of N
       apart, so that each is a stream of its own, where neighbours of few values of k would be short ones. */
    const int streams = M <= (b.dtype == TW_BF16 ? 8 : 12) && !b.k_major && N % 4 == 0 && K % TW_DOT_STEP == 0;
    const int64_t apart = streams ? N / 4 : 1;
    for (int64_t k0 = 0; k0 < K; k0 += kb) {
        const int64_t kend = k0 + kb < K ? k0 + kb : K;
        for (int64_t i0 = 0; i0 < M; i0 += mb) {
            const int64_t m = i0 + mb < M ? mb : M - i0;
            for (int64_t k = k0; k < kend; k += TW_DOT_KC) {
                const int64_t kc = k + TW_DOT_KC < kend ? TW_DOT_KC : kend - k;
                for (int64_t i = 0, rows; i < m; i += rows) {
                    rows = tw_dot_rows_(m - i);
                    tw_dot_pack_(a, i0 + i, rows, k, kc, apack + (k - k0) * m + i * tw_dot_padded_(kc), 8, rows * 8);
                }
            }
            for (int64_t j0 = 0; j0 < N; j0 += nb) {
                const int64_t n = j0 + nb < N ? nb : N - j0;
                for (int64_t k = k0; k < kend; k += TW_DOT_KC) {
                    const int64_t kc = k + TW_DOT_KC < kend ? TW_DOT_KC : kend - k;
                    tw_dot_columns_(m, N, j0, n, k, kc, apack + (k - k0) * m, b, apart, c + i0 * ldc, ldc, bpack);
                }
            }
        }
    }
}

#endif /* TW_DOT_H */
