// What the casts to FP8 have in common: reading any layout of x, the scale of a block, and e4m3.
//
//     amax = largest |x| of the block that is finite, at least amax_floor
//     sf   = amax / 448, with use_ue8m0 rounded up to a power of two
//     q    = e4m3(x * (1 / sf)), to nearest even; NaN where x is NaN or infinite
//
// Every operation is a rounded one of IEEE 754, so PyTorch on a CPU gets the same bits.
#pragma once

#include "ptx/types.cuh"

enum InputType { FLOAT32, BFLOAT16, FLOAT16 };

constexpr int CHUNK = 16;       // consecutive elements of a row that a thread takes: 16 bytes of q
constexpr float FP8_MAX = 448;  // largest finite e4m3

struct CastArgs {
    const void* x;       // [rows, cols], of type Config::INPUT_TYPE
    uint8_t* q;          // e4m3 [rows, cols], contiguous
    float* sf;           // scales, in the layout of each cast
    int64_t stride_row;  // of x, elements
    int64_t stride_col;  // of x, elements; 1 if Config::IS_ALIGNED
    int64_t sf_stride;   // of the outer dimension of sf, elements
    uint32_t rows;       // of x
    uint32_t cols;       // of x
    float amax_floor;    // so large that sf is a normal number
    uint32_t use_ue8m0;  // whether scales are rounded up to powers of two
};

DEVICE uint32_t ceil_div(uint32_t x, uint32_t y) { return (x + y - 1) / y; }

// 32 bits of x: one float32, or two 16-bit numbers of which the first is in the lower half.
template <int TYPE>
struct Word {
    static constexpr int ELEMENTS = TYPE == FLOAT32 ? 1 : 2;
    uint32_t bits;

    // x * 0 + x is x, but NaN for infinity, which e4m3 does not have.
    DEVICE void make_infinity_nan() {
        if constexpr (TYPE == FLOAT32) {
            bits = __float_as_uint(__fmaf_rn(__uint_as_float(bits), 0.0f, __uint_as_float(bits)));
        } else if constexpr (TYPE == BFLOAT16) {
            asm("fma.rn.bf16x2 %0, %0, %1, %0;" : "+r"(bits) : "r"(0));
        } else {
            asm("fma.rn.f16x2 %0, %0, %1, %0;" : "+r"(bits) : "r"(0));
        }
    }

    // This, which is not negative, becomes max(this, |other|), element by element; NaN counts as 0:
    // of two numbers the instructions take the one that is not NaN.
    DEVICE void max_magnitude(Word other) {
        if constexpr (TYPE == FLOAT32) {
            const float magnitude = fabsf(__uint_as_float(other.bits));
            bits = __float_as_uint(fmaxf(__uint_as_float(bits), magnitude));
        } else if constexpr (TYPE == BFLOAT16) {
            asm("max.bf16x2 %0, %0, %1;" : "+r"(bits) : "r"(other.bits & 0x7FFF7FFF));
        } else {
            asm("max.f16x2 %0, %0, %1;" : "+r"(bits) : "r"(other.bits & 0x7FFF7FFF));
        }
    }

    // Element `i` as float32.
    DEVICE float element(int i) const {
        if constexpr (TYPE == FLOAT32) {
            return __uint_as_float(bits);
        } else if constexpr (TYPE == BFLOAT16) {
            return __uint_as_float(i == 0 ? bits << 16 : bits & 0xFFFF0000);
        } else {
            const uint16_t half = bits >> i * 16;
            float value;
            asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
            return value;
        }
    }
};

// The elements of a chunk stay as they are in memory, which takes fewer registers than float32.
template <class Config>
struct Chunk {
    using Word = ::Word<Config::INPUT_TYPE>;
    static constexpr int NUM_WORDS = CHUNK / Word::ELEMENTS;
    Word words[NUM_WORDS];

    // Outside of x its last row or column is read again: it is a part of the same block, so that no
    // maximum changes. Hence no branch, and all loads of a thread are in flight together.
    DEVICE void load(const CastArgs& args, uint32_t row, uint32_t col) {
        const int64_t begin = min(row, args.rows - 1) * args.stride_row;
        if constexpr (Config::IS_ALIGNED) {  // chunks are adjacent, 16-byte aligned, never partial
            const int64_t index = begin + min(col, args.cols - CHUNK);
            const auto* words_of_x = static_cast<const Word*>(args.x) + index / Word::ELEMENTS;
#pragma unroll
            for (int i = 0; i < NUM_WORDS / 4; ++i) {
                const uint4 piece = __ldg(reinterpret_cast<const uint4*>(words_of_x) + i);
                words[4 * i + 0].bits = piece.x;
                words[4 * i + 1].bits = piece.y;
                words[4 * i + 2].bits = piece.z;
                words[4 * i + 3].bits = piece.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                const int64_t index = begin + min(col + i, args.cols - 1) * args.stride_col;
                uint32_t& bits = words[i / Word::ELEMENTS].bits;
                if constexpr (Word::ELEMENTS == 1) {
                    bits = __ldg(static_cast<const uint32_t*>(args.x) + index);
                } else {
                    const uint32_t half = __ldg(static_cast<const uint16_t*>(args.x) + index);
                    bits = i % 2 == 0 ? half : bits | half << 16;
                }
            }
        }
    }

    DEVICE void make_infinity_nan() {
#pragma unroll
        for (Word& word : words) word.make_infinity_nan();
    }

    DEVICE float element(int i) const {
        return words[i / Word::ELEMENTS].element(i % Word::ELEMENTS);
    }

    DEVICE float amax() const {
        Word largest = {0};
#pragma unroll
        for (const Word& word : words) largest.max_magnitude(word);
        return fmaxf(largest.element(0), largest.element(Word::ELEMENTS - 1));
    }
};

// The maximum over the lanes whose index differs in the bits from STEP up, below END.
template <int STEP, int END>
DEVICE float max_over_lanes(float value) {
#pragma unroll
    for (int offset = STEP; offset < END; offset *= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, offset));
    }
    return value;
}

DEVICE float make_scale(const CastArgs& args, float amax) {
    const float sf = __fdiv_rn(fmaxf(amax, args.amax_floor), FP8_MAX);
    // A carry out of the mantissa is the next exponent.
    return args.use_ue8m0 ? __uint_as_float((__float_as_uint(sf) + 0x7FFFFF) & 0x7F800000) : sf;
}

// PTX ISA, "Data Movement and Conversion Instructions: cvt"; the first operand lands in the upper
// byte. A product is never beyond 448 by more than rounding, so saturation only takes that back.
DEVICE uint32_t cvt_e4m3x2(float low, float high) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Writes a chunk of q: element i of x times factor(i).
template <class Config, class Factor>
DEVICE void store_chunk(const CastArgs& args, uint32_t row, uint32_t col, const Chunk<Config>& x,
                        Factor factor) {
    uint32_t words[CHUNK / 4];
#pragma unroll
    for (int i = 0; i < CHUNK / 4; ++i) {
        float q[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) q[j] = __fmul_rn(x.element(4 * i + j), factor(4 * i + j));
        words[i] = cvt_e4m3x2(q[0], q[1]) | cvt_e4m3x2(q[2], q[3]) << 16;
    }
    if (row >= args.rows || col >= args.cols) return;
    uint8_t* out = args.q + (int64_t(row) * args.cols + col);
    if (Config::IS_ALIGNED || args.cols % CHUNK == 0) {
        *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            if (col + i < args.cols) out[i] = words[i / 4] >> i % 4 * 8;
        }
    }
}
