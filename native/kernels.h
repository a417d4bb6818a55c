// The library's C interface. It uses neither Python nor Torch, and no exception leaves it.
#pragma once

#include <stdint.h>

#define MM_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// A view of pixels in a buffer of the caller. The channels of a pixel are consecutive bytes; the strides of
// columns and rows are arbitrary, and negative in a flipped view.
struct mm_pixels {
    const uint8_t* buffer;  // lowest address of the buffer
    int64_t bytes;          // size of the buffer
    int64_t first;          // offset of the leftmost pixel of the top row
    int64_t row_stride, pixel_stride;
    int64_t width, height;
    int64_t channels;  // 3, or 4; the fourth is ignored
};

// Pixels are resized to the content size, placed on a canvas filled with one value, and split into patches.
struct mm_patchify_request {
    struct mm_pixels pixels;
    int64_t arithmetic;  // enum mm_arithmetic; not used if the pixels have the content size already
    int64_t content_width, content_height;
    int64_t left, top;  // of the content on the canvas
    int64_t canvas_width, canvas_height;
    int64_t fill;   // 0 to 255, value of the canvas outside the content
    int64_t patch;  // side of a patch, in pixels
    int64_t merge;  // side, in patches, of the blocks whose patches are consecutive
    uint8_t* out;   // [canvas_height * canvas_width / patch^2][3][patch][patch]
    int64_t out_bytes;
    int64_t level;  // index of an instruction set of mm_level, or -1 for the best one of this CPU
};

enum mm_arithmetic {
    mm_pillow = 0,  // weights in 22 bits of fixed point
    mm_torch = 1,   // weights in as many bits as fit int16
};

// The functions below return NULL on success, else a static message. `out` is then untouched, except that
// mm_unfilter may have written the rows before one with an unknown filter type. "out of memory" is the only
// message that is not about invalid arguments or data.
MM_API const char* mm_resize_and_patchify(const struct mm_patchify_request* request);

// Undo the row filters of a PNG (W3C PNG, third edition, 9.2). `data` has `height` rows of one filter type byte
// and row_bytes bytes; `out` gets `height` rows of row_bytes. `pixel_bytes`, 1 to 8, is the distance to the left
// neighbour.
MM_API const char* mm_unfilter(const uint8_t* data, int64_t data_bytes, int64_t height, int64_t row_bytes,
                               int64_t pixel_bytes, uint8_t* out, int64_t out_bytes, int64_t level);

// Return the name of an instruction set that this CPU supports, by index from the most basic one; NULL after
// the last.
MM_API const char* mm_level(int64_t index);

// Version of this interface: raised when a function, a struct or the meaning of a field changes.
MM_API int64_t mm_interface(void);

#ifdef __cplusplus
}
#endif
