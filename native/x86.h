// Operations of both x86-64 levels on vectors of 128 bits; included inside their namespaces.

inline __m128i load(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

inline void store(__m128i bytes, uint8_t* to) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes); }

inline void transpose(const uint8_t* const from[4], uint8_t* const to[4]) {
    const __m128i loose = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    const __m128i tight = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    __m128i rows[4];
    for (int i = 0; i < 4; i++) rows[i] = _mm_shuffle_epi8(load(from[i]), loose);
    const __m128i a = _mm_unpacklo_epi32(rows[0], rows[1]), b = _mm_unpackhi_epi32(rows[0], rows[1]);
    const __m128i c = _mm_unpacklo_epi32(rows[2], rows[3]), d = _mm_unpackhi_epi32(rows[2], rows[3]);
    store(_mm_shuffle_epi8(_mm_unpacklo_epi64(a, c), tight), to[0]);
    store(_mm_shuffle_epi8(_mm_unpackhi_epi64(a, c), tight), to[1]);
    store(_mm_shuffle_epi8(_mm_unpacklo_epi64(b, d), tight), to[2]);
    store(_mm_shuffle_epi8(_mm_unpackhi_epi64(b, d), tight), to[3]);
}

// Four channels of 16 bits each.
struct Pixel {
    __m128i v;

    static Pixel read(const uint8_t* from) {
        int32_t bytes;
        std::memcpy(&bytes, from, 4);
        return {_mm_cvtepu8_epi16(_mm_cvtsi32_si128(bytes))};
    }

    void write(uint8_t* to) const {
        const int32_t bytes = _mm_cvtsi128_si32(_mm_packus_epi16(v, v));
        std::memcpy(to, &bytes, 4);
    }

    Pixel plus(Pixel other) const {  // modulo 256, as bytes
        return {_mm_add_epi8(v, other.v)};
    }

    static Pixel paeth(Pixel left, Pixel up, Pixel corner) {
        const __m128i across = _mm_sub_epi16(up.v, corner.v), down = _mm_sub_epi16(left.v, corner.v);
        const __m128i to_left = _mm_abs_epi16(across), to_up = _mm_abs_epi16(down);
        const __m128i to_corner = _mm_abs_epi16(_mm_add_epi16(across, down));
        const __m128i least = _mm_min_epi16(to_corner, _mm_min_epi16(to_left, to_up));
        const __m128i other = _mm_blendv_epi8(corner.v, up.v, _mm_cmpeq_epi16(least, to_up));
        return {_mm_blendv_epi8(other, left.v, _mm_cmpeq_epi16(least, to_left))};
    }
};
