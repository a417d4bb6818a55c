// The kernels for x86-64 CPUs with the AVX-512 extensions of Ice Lake and Zen 4.

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "levels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif

namespace mm {
namespace level_avx512 {

constexpr int LANES = 16, VECTORS = 3;
typedef __m512i Ints, Pairs;

#include "x86.h"

inline Ints broadcast(int32_t value) { return _mm512_set1_epi32(value); }

inline Pairs interleave(const uint8_t* a, const uint8_t* b) {
    const __m512i low = _mm512_cvtepu8_epi32(load(a));
    const __m512i high = _mm512_cvtepu8_epi32(load(b));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

inline Ints dot_add(Ints sum, Pairs pairs, int32_t weights) {
    return _mm512_dpwssd_epi32(sum, pairs, broadcast(weights));
}

inline Ints shift_add(Ints sum, Ints low, int by) { return _mm512_add_epi32(_mm512_slli_epi32(sum, by), low); }

inline void narrow(Ints sum, int shift, uint8_t* to) {
    sum = _mm512_max_epi32(_mm512_srai_epi32(sum, shift), _mm512_setzero_si512());
    store(_mm512_cvtusepi32_epi8(sum), to);
}

#include "level.inc"

}  // namespace level_avx512

const Level avx512 = {"avx512", level_avx512::ROWS, level_avx512::resize_and_patchify, level_avx512::unfilter};

}  // namespace mm

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
