// Fragments of D: conversion to bf16 and the store of whole matrices to shared memory.
#pragma once

#include "ptx/types.cuh"

// Two float32 to two bf16, round to nearest even; `low` lands at the lower address.
DEVICE uint32_t cvt_bf16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// PTX ISA, "Warp Level Matrix Store Instruction: stmatrix": four 8x8 matrices, matrix i to the rows
// that lanes 8i to 8i+7 point at.
DEVICE void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

DEVICE float ld_shared_f32(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
}

// A store that is predicated, not branched around.
DEVICE void st_global_b32_if(bool condition, const void* dst, uint32_t value) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.b32 [%1], %2;}" ::"r"(
                     static_cast<int>(condition)),
                 "l"(dst), "r"(value)
                 : "memory");
}
