/* Scalars, bf16, e4m3 and elementwise functions of generated kernels.
 *
 * The functions are branch-free polynomials, so that gcc vectorises loops over them, and
 * they spell out each fused multiply-add, so that vector and scalar code give equal bits.
 */
#ifndef TW_MATH_H
#define TW_MATH_H

#include <stdint.h>
#include <string.h>

#define TW_FN static inline __attribute__((always_inline, unused))

TW_FN int64_t tw_min(int64_t a, int64_t b) { return a < b ? a : b; }
TW_FN int64_t tw_max(int64_t a, int64_t b) { return a > b ? a : b; }
TW_FN int64_t tw_floordiv(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a % b < 0) != (b < 0)); }
TW_FN int64_t tw_mod(int64_t a, int64_t b) { return a - tw_floordiv(a, b) * b; }

TW_FN float tw_fmax(float a, float b) { return a > b || a != a ? a : b; }
TW_FN float tw_fmin(float a, float b) { return a < b || a != a ? a : b; }

TW_FN float tw_float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
TW_FN uint32_t tw_bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

TW_FN float tw_from_bf16(uint16_t x) { return tw_float_of((uint32_t)x << 16); }

/* To nearest, ties to even; a NaN stays a NaN. */
TW_FN uint16_t tw_to_bf16(float x) {
    uint32_t bits = tw_bits_of(x), nan = (bits & 0x7fffffffu) > 0x7f800000u;
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(nan ? (bits >> 16) | 0x40u : rounded);
}
TW_FN float tw_round_bf16(float x) { return tw_from_bf16(tw_to_bf16(x)); }

/* e4m3: an exponent 120 less than that of a float; 127 and 255 are NaN. Subnormals by a difference of two floats. */
TW_FN float tw_from_e4m3(uint8_t x) {
    uint32_t size = x & 0x7fu, sign = ((uint32_t)x & 0x80u) << 24;
    uint32_t subnormal = tw_bits_of(tw_float_of((size << 20) + (121u << 23)) - 0x1p-6f);
    uint32_t normal = (size << 20) + (120u << 23);
    uint32_t number = size < 8u ? subnormal : normal;
    return tw_float_of((size == 0x7fu ? 0x7fc00000u : number) | sign);
}

/* To nearest, ties to even, beyond 448 to 448; a NaN stays a NaN. Floats from 2^14 on lie as far apart as subnormals. */
TW_FN uint8_t tw_to_e4m3(float x) {
    uint32_t bits = tw_bits_of(x), size = bits & 0x7fffffffu, largest = 0x43e00000u;
    uint32_t kept = size > largest ? largest : size;
    uint32_t normal = ((kept + 0x7ffffu + ((kept >> 20) & 1u)) >> 20) - 960u;
    uint32_t subnormal = tw_bits_of(tw_float_of(kept) + 0x1p14f) - 0x46800000u;
    uint32_t number = kept < 0x3c800000u ? subnormal : normal;
    return (uint8_t)((size > 0x7f800000u ? 0x7fu : number) | ((bits >> 24) & 0x80u));
}
TW_FN float tw_round_e4m3(float x) { return tw_from_e4m3(tw_to_e4m3(x)); }

/* e^x: 2^n times a polynomial in [-ln2/2, ln2/2]; below 1.5 ulp where the result is normal.
 * At the two bounds the last products round to 0 and overflow to infinity by themselves. */
TW_FN float tw_exp(float x) {
    float y = x < -104.0f ? -104.0f : x;
    y = y > 89.0f ? 89.0f : y;
    float n = __builtin_fmaf(y, 1.44269504089f, 12582912.0f) - 12582912.0f;
    float r = __builtin_fmaf(n, -0.693145751953125f, y);
    r = __builtin_fmaf(n, -1.428606765330187e-06f, r);
    float p = 1.9875691500e-4f;
    p = __builtin_fmaf(p, r, 1.3981999507e-3f);
    p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f);
    p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f);
    p = __builtin_fmaf(p * r, r, r) + 1.0f;
    /* In two steps, since 2^n alone may be out of range where the product is not. */
    int32_t whole = (int32_t)n, half = whole / 2;
    p *= tw_float_of((uint32_t)(half + 127) << 23);
    p *= tw_float_of((uint32_t)(whole - half + 127) << 23);
    return x != x ? x : p;
}

TW_FN float tw_sigmoid(float x) { return 1.0f / (1.0f + tw_exp(-x)); }

/* Odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel. */
TW_FN float tw_tanh(float x) {
    float a = __builtin_fabsf(x), z = x * x;
    float far = 1.0f - 2.0f / (tw_exp(2.0f * a) + 1.0f);
    float p = -5.70498872745e-3f;
    p = __builtin_fmaf(p, z, 2.06390887954e-2f);
    p = __builtin_fmaf(p, z, -5.37397155531e-2f);
    p = __builtin_fmaf(p, z, 1.33314422036e-1f);
    p = __builtin_fmaf(p, z, -3.33332819422e-1f);
    float near = __builtin_fmaf(p * z, a, a);
    return __builtin_copysignf(a < 0.625f ? near : far, x);
}

/* Natural logarithm by its atanh series on [sqrt(1/2), sqrt(2)]; NaN below 0. */
TW_FN float tw_log(float x) {
    int32_t subnormal = x < 0x1p-126f;
    uint32_t bits = tw_bits_of(subnormal ? x * 0x1p23f : x);
    int32_t e = (int32_t)((bits - 0x3f3504f3u) >> 23) - ((bits < 0x3f3504f3u) ? 512 : 0);
    float m = tw_float_of(bits - ((uint32_t)e << 23));
    float s = (m - 1.0f) / (m + 1.0f), z = s * s;
    float p = 0.2222222222f;
    p = __builtin_fmaf(p, z, 0.2857142857f);
    p = __builtin_fmaf(p, z, 0.4f);
    p = __builtin_fmaf(p, z, 0.6666666667f);
    float y = __builtin_fmaf(p * z, s, 2.0f * s);
    y = __builtin_fmaf((float)(subnormal ? e - 23 : e), 0.693147180560f, y);
    y = x == 0.0f ? -__builtin_inff() : y;
    y = x == __builtin_inff() ? x : y;
    return x < 0.0f || x != x ? __builtin_nanf("") : y;
}

/* Error function: a Taylor-like polynomial below 0.84375; above it 1 - e^(-x^2) times a
 * polynomial in t = 1 / (1 + 0.3275911 x) (Abramowitz and Stegun, 7.1.26, absolute error
 * 1.5e-7). */
TW_FN float tw_erf(float x) {
    float a = __builtin_fabsf(x), z = x * x;
    float p = 7.85386146e-5f;
    p = __builtin_fmaf(p, z, -8.01019365e-4f);
    p = __builtin_fmaf(p, z, 5.18832775e-3f);
    p = __builtin_fmaf(p, z, -2.68538129e-2f);
    p = __builtin_fmaf(p, z, 1.12835854e-1f);
    p = __builtin_fmaf(p, z, -3.76126261e-1f);
    p = __builtin_fmaf(p, z, 1.12837916e+0f);
    float near = p * a;
    float t = 1.0f / __builtin_fmaf(0.3275911f, a, 1.0f);
    float q = 1.061405429f;
    q = __builtin_fmaf(q, t, -1.453152027f);
    q = __builtin_fmaf(q, t, 1.421413741f);
    q = __builtin_fmaf(q, t, -0.284496736f);
    q = __builtin_fmaf(q, t, 0.254829592f);
    float far = 1.0f - q * t * tw_exp(-z);
    return __builtin_copysignf(a < 0.84375f ? near : far, x);
}

#endif
