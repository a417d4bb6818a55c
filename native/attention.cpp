// Attention within packed segments, for compiled towers (mm_encoder/compiled). It uses Torch through its C shim
// alone, found at run time in the process that has loaded Torch, so that this library does not depend on it.

#include <dlfcn.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

using Tensor = void*;  // AtenTensorHandle
using Status = int32_t;  // AOTITorchError; 0 is success

// torch/csrc/inductor/aoti_torch/c/shim.h and generated/c_shim_cpu.h, unchanged from 2.11 to 2.14.
struct Torch {
    Status (*get_sizes)(Tensor, int64_t**);
    Status (*get_strides)(Tensor, int64_t**);
    Status (*get_data_ptr)(Tensor, void**);
    Status (*get_dtype)(Tensor, int32_t*);
    Status (*reinterpret)(Tensor, int64_t, const int64_t*, const int64_t*, int64_t, Tensor*);
    Status (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor*);
    Status (*attention)(Tensor, Tensor, Tensor, double, int32_t, Tensor*, double*, Tensor*, Tensor*);
    size_t (*element_size)(int32_t);
    Status (*destroy)(Tensor);
    bool complete = false;

    Torch() {
        void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
        if (library == nullptr) return;
        complete = find(library, "aoti_torch_get_sizes", get_sizes) &&
                   find(library, "aoti_torch_get_strides", get_strides) &&
                   find(library, "aoti_torch_get_data_ptr", get_data_ptr) &&
                   find(library, "aoti_torch_get_dtype", get_dtype) &&
                   find(library, "aoti_torch__reinterpret_tensor", reinterpret) &&
                   find(library, "aoti_torch_empty_strided", empty_strided) &&
                   find(library, "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu", attention) &&
                   find(library, "aoti_torch_dtype_element_size", element_size) &&
                   find(library, "aoti_torch_delete_tensor_object", destroy);
    }

    template <typename Function>
    static bool find(void* library, const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        return function != nullptr;
    }
};

const Torch& torch() {
    static const Torch found;
    return found;
}

// A tensor that is released at the end of its scope.
struct Owned {
    Tensor tensor = nullptr;
    ~Owned() {
        if (tensor != nullptr) torch().destroy(tensor);
    }
    Tensor give() {
        Tensor given = tensor;
        tensor = nullptr;
        return given;
    }
};

// View tokens `begin` to `end` of [tokens, heads, dim] as [1, heads, end - begin, dim].
bool view_segment(Tensor packed, int64_t begin, int64_t end, Owned& segment) {
    int64_t *size, *stride;
    if (torch().get_sizes(packed, &size) || torch().get_strides(packed, &stride)) return false;
    const int64_t sizes[] = {1, size[1], end - begin, size[2]};
    const int64_t strides[] = {(end - begin) * stride[0], stride[1], stride[0], stride[2]};
    return torch().reinterpret(packed, 4, sizes, strides, begin * stride[0], &segment.tensor) == 0;
}

// Whether [1, heads, tokens, dim] lies in memory as [tokens, heads, dim], as Torch's kernel leaves it.
bool is_token_major(Tensor rows) {
    int64_t *size, *stride;
    if (torch().get_sizes(rows, &size) || torch().get_strides(rows, &stride)) return false;
    return stride[3] == 1 && stride[1] == size[3] && stride[2] == size[1] * size[3];
}

bool attend(Tensor q, Tensor k, Tensor v, int64_t begin, int64_t end, Owned& rows) {
    Owned query, key, value, statistics;
    return view_segment(q, begin, end, query) && view_segment(k, begin, end, key) &&
           view_segment(v, begin, end, value) &&
           torch().attention(query.tensor, key.tensor, value.tensor, 0.0, 0, nullptr, nullptr, &rows.tensor,
                             &statistics.tensor) == 0 &&
           is_token_major(rows.tensor);
}

bool packed_attention(Tensor q, Tensor k, Tensor v, Tensor bounds, Owned& out) {
    int64_t *size, *count;
    void* data;
    int32_t dtype;
    if (!torch().complete || torch().get_sizes(q, &size) || torch().get_sizes(bounds, &count) ||
        torch().get_data_ptr(bounds, &data) || torch().get_dtype(q, &dtype))
        return false;
    const int64_t* bound = static_cast<const int64_t*>(data);
    const int64_t segments = count[0] - 1, tokens = size[0], width = size[1] * size[2];
    const int64_t sizes[] = {tokens, width}, strides[] = {width, 1};
    if (segments < 1 || bound[0] != 0 || bound[segments] != tokens) return false;
    if (segments == 1) {
        Owned rows;
        return attend(q, k, v, 0, tokens, rows) &&
               torch().reinterpret(rows.tensor, 2, sizes, strides, 0, &out.tensor) == 0;
    }
    constexpr int32_t cpu = 0;
    void* to;
    if (torch().empty_strided(2, sizes, strides, dtype, cpu, 0, &out.tensor) ||
        torch().get_data_ptr(out.tensor, &to))
        return false;
    const size_t row = static_cast<size_t>(width) * torch().element_size(dtype);
    for (int64_t i = 0; i < segments; ++i) {
        Owned rows;
        void* from;
        if (bound[i + 1] <= bound[i] || !attend(q, k, v, bound[i], bound[i + 1], rows) ||
            torch().get_data_ptr(rows.tensor, &from))
            return false;
        std::memcpy(static_cast<char*>(to) + static_cast<size_t>(bound[i]) * row, from,
                    static_cast<size_t>(bound[i + 1] - bound[i]) * row);
    }
    return true;
}

}  // namespace

// Called by a compiled tower under the name that Torch's compiler gives to the operator's C shim.
extern "C" MM_API int32_t aoti_torch_cpu_packed_attention(Tensor q, Tensor k, Tensor v, Tensor bounds,
                                                          Tensor* out) {
    Owned rows;
    if (!packed_attention(q, k, v, bounds, rows)) return 1;
    *out = rows.give();
    return 0;
}
