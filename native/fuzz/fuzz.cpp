// Random geometry and invalid arguments for the kernels, to be built with sanitizers (see tests/test_native.py).
// Buffers have exactly the size that the request states, so that the sanitizers find every access beyond them. All
// instruction sets must compute the same bytes.

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "../kernels.h"

namespace {

std::mt19937_64 source(1);

int64_t below(int64_t limit) { return static_cast<int64_t>(source() % static_cast<uint64_t>(limit)); }

int64_t side() {
    const int64_t limits[] = {1, 3, 20, 70, 300};
    return 1 + below(limits[below(5)]);
}

using Bytes = std::vector<uint8_t>;

Bytes noise(int64_t size) {
    Bytes bytes(static_cast<size_t>(size));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(source());
    return bytes;
}

int64_t differences = 0, done = 0, refused = 0;

// Compare the output of all levels for one request. `out` is allocated for each, of the stated size if that is sane.
void compare(mm_patchify_request request) {
    Bytes first;
    for (int64_t level = 0; mm_level(level); level++) {
        Bytes out(request.out_bytes >= 0 && request.out_bytes < 1 << 24 ? static_cast<size_t>(request.out_bytes) : 0);
        request.out = out.data();
        request.level = level;
        if (mm_resize_and_patchify(&request)) {
            refused++;
            return;
        }
        done++;
        if (level == 0)
            first = out;
        else if (out != first)
            differences++;
    }
}

void geometry(bool hostile) {
    mm_patchify_request request = {};
    mm_pixels& p = request.pixels;
    p.channels = 3 + below(2);
    p.width = side();
    p.height = side();
    if (below(400) == 0) (below(2) ? p.width : p.height) = 1 + below(60000);  // thousands of weights
    const int64_t gap = below(4), slack = below(9);
    p.pixel_stride = p.channels + gap;
    p.row_stride = (p.width - 1) * p.pixel_stride + p.channels + slack;
    if (below(4) == 0) {  // a transposed view
        p.row_stride = p.channels + gap;
        p.pixel_stride = (p.height - 1) * p.row_stride + p.channels + slack;
    }
    const int64_t size = (p.height - 1) * p.row_stride + (p.width - 1) * p.pixel_stride + p.channels;
    for (auto [stride, count] : {std::pair(&p.row_stride, p.height), std::pair(&p.pixel_stride, p.width)})
        if (below(3) == 0) {
            p.first += *stride * (count - 1);
            *stride = -*stride;
        }
    const Bytes pixels = noise(size);
    p.buffer = pixels.data();
    p.bytes = size;
    request.patch = below(3) ? 14 + 2 * below(2) : 1 + below(9);
    request.merge = 1 + below(3);
    const int64_t block = request.patch * request.merge;
    request.canvas_width = block * (1 + below(5));
    request.canvas_height = block * (1 + below(5));
    request.content_width = below(3) ? 1 + below(request.canvas_width) : p.width;
    request.content_height = below(3) ? 1 + below(request.canvas_height) : p.height;
    if (request.content_width > request.canvas_width) request.content_width = request.canvas_width;
    if (request.content_height > request.canvas_height) request.content_height = request.canvas_height;
    request.left = below(request.canvas_width - request.content_width + 1);
    request.top = below(request.canvas_height - request.content_height + 1);
    request.fill = below(256);
    request.arithmetic = below(2);
    request.out_bytes = 3 * request.canvas_width * request.canvas_height;
    if (hostile) {
        int64_t* const fields[] = {&p.bytes, &p.first, &p.row_stride, &p.pixel_stride, &p.width, &p.height,
                                   &p.channels, &request.arithmetic, &request.content_width,
                                   &request.content_height, &request.left, &request.top, &request.canvas_width,
                                   &request.canvas_height, &request.fill, &request.patch, &request.merge,
                                   &request.out_bytes};
        const int64_t values[] = {0, 1, -1, 2, 255, 256, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, 1 << 24, 1 << 25,
                                  INT64_MAX / 3, INT64_MAX - 2};
        for (int64_t count = 1 + below(3); count > 0; count--) {
            int64_t& field = *fields[below(18)];
            field = below(2) ? values[below(14)] : static_cast<int64_t>(static_cast<uint64_t>(field) + source() % 9 - 4);
        }
        if (p.bytes > size) p.bytes = size;  // the library cannot check the buffer's true size
        if (below(50) == 0) p.buffer = nullptr;
        // Valid requests that would take too long in a test: check them without an output.
        if (p.width > 4096 || p.height > 4096 || request.canvas_width > 4096 || request.canvas_height > 4096) {
            mm_patchify_request checked = request;
            checked.out = nullptr;
            if (!mm_resize_and_patchify(&checked)) differences++;
            refused++;
            return;
        }
    }
    compare(request);
}

void filters(bool hostile) {
    int64_t height = side() / 4 + 1, size = 1 + below(8), row = below(2) ? size * side() : side();
    const Bytes noisy = noise(height * (1 + row));
    Bytes data = noisy, first;
    for (int64_t y = 0; y < height; y++) data[y * (1 + row)] = static_cast<uint8_t>(below(hostile ? 6 : 5));
    int64_t claimed_height = height, claimed_row = row, claimed_size = size;
    if (hostile) {
        int64_t* const fields[] = {&claimed_height, &claimed_row, &claimed_size};
        const int64_t values[] = {0, -1, 9, INT32_MAX, INT64_MAX, INT64_MIN, INT64_MAX / 2};
        *fields[below(3)] = below(2) ? values[below(7)] : 1 + below(300);
    }
    for (int64_t level = 0; mm_level(level); level++) {
        Bytes out(static_cast<size_t>(height * row));
        if (mm_unfilter(data.data(), static_cast<int64_t>(data.size()), claimed_height, claimed_row, claimed_size,
                        out.data(), static_cast<int64_t>(out.size()), level)) {
            refused++;
            return;
        }
        done++;
        if (level == 0)
            first = out;
        else if (out != first)
            differences++;
    }
}

}  // namespace

int main(int count, char** arguments) {
    const std::string_view what = count > 1 ? arguments[1] : "";
    if (what == "overrun") {  // controls: the sanitizers must report these two
        volatile int64_t end = 8;
        return Bytes(8).data()[end];
    }
    if (what == "overflow") {
        volatile int32_t most = INT32_MAX;
        volatile int32_t more = most + 1;
        return more;
    }
    const int64_t rounds = count > 1 ? std::strtoll(arguments[1], nullptr, 10) : 1000;
    if (!mm_resize_and_patchify(nullptr)) differences++;
    for (int64_t round = 0; round < rounds; round++) {
        geometry(round % 2);
        filters(round % 2);
    }
    std::printf("%" PRId64 " done, %" PRId64 " refused, %" PRId64 " differences\n", done, refused, differences);
    return differences != 0;
}
