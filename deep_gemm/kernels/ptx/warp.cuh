// What the 32 lanes of a warp do together. Lanes<T> is one T in each lane, a plain value is the same
// in all of them; tests/test_grouped_scheduler.py has the same functions over 32 values for the CPU.
#pragma once

#include "ptx/types.cuh"

template <class T>
using Lanes = T;

DEVICE Lanes<uint32_t> lane_index() { return threadIdx.x % 32; }

// True in the lane that writes what the warp has found.
DEVICE bool is_first_lane() { return threadIdx.x % 32 == 0; }

// One bit for each lane.
DEVICE uint32_t vote(Lanes<bool> condition) { return __ballot_sync(0xFFFFFFFF, condition); }

DEVICE uint32_t broadcast(Lanes<uint32_t> value, uint32_t lane_idx) {
    return __shfl_sync(0xFFFFFFFF, value, lane_idx);
}

// The value of the lane before; lane 0 keeps its own.
DEVICE Lanes<uint32_t> from_lane_before(Lanes<uint32_t> value) {
    return __shfl_up_sync(0xFFFFFFFF, value, 1);
}

// The sum over the lanes up to and including each.
DEVICE Lanes<uint32_t> inclusive_sum(Lanes<uint32_t> value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t other = __shfl_up_sync(0xFFFFFFFF, value, distance);
        if (threadIdx.x % 32 >= distance) value += other;
    }
    return value;
}

// A value that is the same in all lanes, in a way that tells the compiler so.
DEVICE uint32_t uniform(uint32_t value) { return __shfl_sync(0xFFFFFFFF, value, 0); }

template <class T>
DEVICE Lanes<T> select(Lanes<bool> condition, Lanes<T> yes, Lanes<T> no) {
    return condition ? yes : no;
}

// values[index] where `condition` holds, `otherwise` elsewhere.
DEVICE Lanes<int32_t> load_if(Lanes<bool> condition, const int32_t* values, Lanes<uint32_t> index,
                              int32_t otherwise) {
    int32_t value = otherwise;
    if (condition)
        asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(values + index) : "memory");
    return value;
}

// Of the bits of a mask that is not zero: the lowest, and the highest.
DEVICE uint32_t lowest_bit(uint32_t mask) { return __ffs(mask) - 1; }
DEVICE uint32_t highest_bit(uint32_t mask) { return 31 - __clz(mask); }
// How many bits from bit 0 on are set.
DEVICE uint32_t leading_ones(uint32_t mask) { return ~mask ? __ffs(~mask) - 1 : 32; }

// Lane 0 adds one to a counter in global memory and gets what it was; the others get nothing.
DEVICE Lanes<uint32_t> draw(uint32_t* counter) {
    return threadIdx.x % 32 == 0 ? atomicAdd(counter, 1) : 0;
}

DEVICE void reset(uint32_t* counter) {
    if (threadIdx.x % 32 == 0) *counter = 0;
}
