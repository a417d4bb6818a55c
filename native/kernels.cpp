// Argument checks, resize weights, and the choice of an instruction set.

#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>

#include "levels.h"

namespace mm {

namespace {

constexpr int64_t LONGEST = 1 << 24;  // longest side, in pixels: products of two sides and a few bytes fit int64

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Bicubic with a = -1/2 (Keys 1981), in each library's order of operations. Its sums and divisions are also done
// in double and in the same order, so that every weight rounds to the same integer.
double cubic_pillow(double x) {
    constexpr double a = -0.5;
    x = std::abs(x);
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
    return 0;
}

double cubic_torch(double x) {
    constexpr double a = -0.5;
    x = std::abs(x);
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    if (x < 2) return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
    return 0;
}

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

Memory allocate(int64_t bytes) {
    return Memory(static_cast<uint8_t*>(std::calloc(static_cast<size_t>(bytes), 1)));
}

// An axis that owns its memory.
struct OwnedAxis : Axis {
    Memory owner;

    // Compute the weights. Returns false if out of memory.
    bool fill(int64_t from, int64_t to, int64_t arithmetic) {
        const double scale = static_cast<double>(from) / static_cast<double>(to);
        const double wider = std::max(scale, 1.0), support = 2.0 * wider, inverse = 1.0 / wider;
        pairs = (std::min(from, static_cast<int64_t>(std::ceil(support)) * 2 + 1) + 1) / 2;
        const int64_t taps = 2 * pairs;
        owner = allocate(to * (taps * 8 + pairs * 8 + 8));
        if (!owner) return false;
        double* real = reinterpret_cast<double*>(owner.get());
        weights = reinterpret_cast<int32_t*>(real + to * taps);
        low = weights + to * pairs;
        first = low + to * pairs;
        count = first + to;
        double largest = 0;
        for (int64_t i = 0; i < to; i++) {
            const double centre = (static_cast<double>(i) + 0.5) * scale;
            const int64_t start = std::max<int64_t>(0, static_cast<int64_t>(centre - support + 0.5));
            const int64_t end = std::min(from, static_cast<int64_t>(centre + support + 0.5));
            first[i] = static_cast<int32_t>(start);
            count[i] = static_cast<int32_t>(std::min(end - start, taps));
            double* row = real + i * taps;
            double total = 0;
            for (int64_t k = 0; k < count[i]; k++) {
                const double x = (static_cast<double>(k + start) - centre + 0.5) * inverse;
                row[k] = arithmetic == mm_pillow ? cubic_pillow(x) : cubic_torch(x);
                total += row[k];
            }
            for (int64_t k = 0; k < count[i]; k++) {
                if (total != 0) row[k] /= total;
                largest = std::max(largest, row[k]);
            }
        }
        shift = 22;  // of 32 bits, 8 are for the pixel and 2 for sums that overshoot
        if (arithmetic == mm_torch) {
            shift = 0;
            while (shift < 22 && static_cast<int>(0.5 + largest * (1 << (shift + 1))) < 1 << 15) shift++;
        }
        for (int64_t i = 0; i < to * taps; i++) {
            const double value = real[i] * (1 << shift);
            const int32_t weight = static_cast<int32_t>(value < 0 ? value - 0.5 : value + 0.5);
            const int half = i % 2 * 16;
            if (arithmetic == mm_pillow) {
                low[i / 2] |= (weight & ((1 << LOW_BITS) - 1)) << half;
                weights[i / 2] |= ((weight >> LOW_BITS) & 0xffff) << half;
            } else {
                weights[i / 2] |= (weight & 0xffff) << half;
            }
        }
        if (arithmetic == mm_torch) low = nullptr;
        return true;
    }
};

const Level* level_of(int64_t index) {
    const Level* levels[3] = {&plain};
    int64_t count = 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        levels[count++] = &avx2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512vnni"))
            levels[count++] = &avx512;
    }
#endif
    if (index < 0) index = count - 1;
    return index < count ? levels[index] : nullptr;
}

bool valid_sides(std::initializer_list<int64_t> values) {
    return std::all_of(values.begin(), values.end(), [](int64_t v) { return v > 0 && v <= LONGEST; });
}

// Return whether every pixel is inside the buffer.
bool in_buffer(const mm_pixels& p) {
    int64_t low = p.first, high = p.first;
    for (auto [stride, count] : {std::pair(p.row_stride, p.height), std::pair(p.pixel_stride, p.width)}) {
        int64_t span;
        if (__builtin_mul_overflow(stride, count - 1, &span)) return false;
        int64_t& end = span < 0 ? low : high;
        if (__builtin_add_overflow(end, span, &end)) return false;
    }
    return low >= 0 && p.bytes >= p.channels && high <= p.bytes - p.channels;
}

}  // namespace

Layout::Layout(const mm_patchify_request& request, const Axis* horizontal, const Axis* vertical,
               int64_t rows_per_pass) {
    ring_stride = round_up(request.content_width * 3 + 16, 256);  // padded to whole vectors
    ring_rows = !horizontal && !vertical ? 0 : (vertical ? 2 * vertical->pairs : 1) + rows_per_pass;
    plane = round_up(request.canvas_width, 64);
    columns = 0;  // one column more, for a pair without a second one
    ring = columns + std::max(ring_stride, round_up((request.pixels.width + 1) * (rows_per_pass * 3 + 16), 64));
    lines = ring + ring_rows * ring_stride;
    rows = lines + request.patch * request.merge * 3 * plane;
    total = rows + ring_rows * static_cast<int64_t>(sizeof(uint8_t*));
}

}  // namespace mm

using namespace mm;

const char* mm_level(int64_t index) {
    const Level* level = index < 0 ? nullptr : level_of(index);
    return level ? level->name : nullptr;
}

int64_t mm_interface(void) { return 2; }

const char* mm_resize_and_patchify(const mm_patchify_request* given) {
    if (!given) return "no request";
    mm_patchify_request request = *given;
    mm_pixels& p = request.pixels;
    if (!valid_sides({p.width, p.height, request.content_width, request.content_height, request.canvas_width,
                      request.canvas_height, request.patch, request.merge}))
        return "sides must be 1 to 2^24";
    if (p.channels != 3 && p.channels != 4) return "pixels must have 3 or 4 channels";
    if (!p.buffer || !in_buffer(p)) return "the pixels must lie in their buffer";
    if (request.arithmetic != mm_pillow && request.arithmetic != mm_torch) return "unknown arithmetic";
    if (request.fill < 0 || request.fill > 255) return "fill must be 0 to 255";
    if (request.left < 0 || request.left > request.canvas_width - request.content_width || request.top < 0 ||
        request.top > request.canvas_height - request.content_height)
        return "the content must lie on the canvas";
    if (request.patch * request.merge > LONGEST || request.canvas_width % (request.patch * request.merge) ||
        request.canvas_height % (request.patch * request.merge))
        return "the canvas must be whole blocks of patches";
    if (!request.out || request.out_bytes != 3 * request.canvas_width * request.canvas_height)
        return "out must hold three bytes for each pixel of the canvas";
    const Level* level = level_of(request.level);
    if (!level) return "this CPU has no such instruction set";
    if (p.width == 1) p.pixel_stride = p.channels;  // a single column or row may have any stride
    if (p.height == 1) p.row_stride = p.channels;

    OwnedAxis horizontal, vertical;
    const bool resize_horizontally = request.content_width != p.width;
    const bool resize_vertically = request.content_height != p.height;
    if ((resize_horizontally && !horizontal.fill(p.width, request.content_width, request.arithmetic)) ||
        (resize_vertically && !vertical.fill(p.height, request.content_height, request.arithmetic)))
        return "out of memory";
    const Axis *x = resize_horizontally ? &horizontal : nullptr, *y = resize_vertically ? &vertical : nullptr;
    const Memory scratch = allocate(Layout(request, x, y, level->rows_per_pass).total);
    if (!scratch) return "out of memory";
    level->resize_and_patchify(request, x, y, scratch.get());
    return nullptr;
}

const char* mm_unfilter(const uint8_t* data, int64_t data_bytes, int64_t height, int64_t row_bytes,
                        int64_t pixel_bytes, uint8_t* out, int64_t out_bytes, int64_t index) {
    if (height < 1 || height > INT32_MAX || row_bytes < 1 || row_bytes > int64_t{8} * INT32_MAX)
        return "an image must have 1 to 2^31 - 1 rows and columns";
    if (pixel_bytes < 1 || pixel_bytes > 8) return "pixels must have 1 to 8 bytes";
    int64_t size;
    if (__builtin_mul_overflow(height, row_bytes + 1, &size)) return "the image must fit the address space";
    if (!data || data_bytes != size) return "data must hold every row and its filter type";
    if (!out || out_bytes != size - height) return "out must hold every row";
    const Level* level = level_of(index);
    if (!level) return "this CPU has no such instruction set";
    return level->unfilter(data, height, row_bytes, pixel_bytes, out) ? nullptr : "unknown filter type";
}
