// Integer names and the opaque tensor map: all that these kernels need from a header, so that they
// compile with no header installed (and in about 0.1 s).
#pragma once

using uint8_t = unsigned char;
using int32_t = int;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#else  // tests compile the scheduler for the CPU
#define DEVICE inline
#endif

// CUtensorMap of cuda.h: 128 opaque bytes, filled by cuTensorMapEncodeTiled on the host.
struct alignas(128) TensorMap {
    uint64_t opaque[16];
};
