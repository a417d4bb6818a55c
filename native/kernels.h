// What the extension offers, as plain C functions: no Python, no Torch, no exceptions cross this line.
#pragma once

#include <stdint.h>

#define MM_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Pixels, where they lie in a buffer that the caller owns: channels are consecutive bytes, columns and rows
// are any distance apart (negative: a flipped view).
struct mm_pixels {
    const uint8_t* buffer;  // its lowest byte
    int64_t bytes;          // its size
    int64_t first;          // offset of the pixel at the left of the top row
    int64_t row_stride, pixel_stride;
    int64_t width, height;
    int64_t channels;  // 3, or 4 of which the last is not read
};

// A picture resized to `content`, put on a canvas of one value, and cut into patches.
struct mm_patchify_request {
    struct mm_pixels pixels;
    int64_t arithmetic;  // enum mm_arithmetic; only used where a side of the content differs from the pixels'
    int64_t content_width, content_height;
    int64_t left, top;  // of the content on the canvas
    int64_t canvas_width, canvas_height;
    int64_t fill;   // 0 to 255, what the canvas holds beside the content
    int64_t patch;  // side of a patch
    int64_t merge;  // side of a block, in patches, whose patches follow each other
    uint8_t* out;   // [canvas_height * canvas_width / patch^2][3][patch][patch]
    int64_t out_bytes;
    int64_t level;  // index of an instruction set of mm_level, or -1 for the best that this CPU has
};

enum mm_arithmetic {
    mm_pillow = 0,  // weights in 22 bits of fixed point
    mm_torch = 1,   // weights in as many bits as fit int16
};

// Each returns NULL, or what is wrong; then nothing was written, but for rows before one of an unknown filter. "out of memory" is the one that is no fault
// of the caller's.
MM_API const char* mm_resize_and_patchify(const struct mm_patchify_request* request);

// Undo the row filters of a PNG (W3C PNG, third edition, 9.2): `data` is height rows of 1 + row_bytes, each
// led by its filter's number; `out` gets height rows of row_bytes. `pixel_bytes` is the distance to the left
// neighbour: 1 to 8.
MM_API const char* mm_unfilter(const uint8_t* data, int64_t data_bytes, int64_t height, int64_t row_bytes,
                               int64_t pixel_bytes, uint8_t* out, int64_t out_bytes, int64_t level);

// Name of the instruction set of an index that this CPU has, the plainest first; NULL after the last.
MM_API const char* mm_level(int64_t index);

// Grows when a struct or the meaning of a field changes.
MM_API int64_t mm_interface(void);

#ifdef __cplusplus
}
#endif
