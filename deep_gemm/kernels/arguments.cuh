// What a GEMM kernel is launched with.
#pragma once

#include "grouped_scheduler.cuh"

// NOTES: boxes that reach outside the tensor would be filled with zeros, but slowly: TMA takes about
// 8 clocks for each row that is not there (measured: m = 65 took twice as long as m = 128). So edge
// tiles are loaded through maps of their own, whose boxes end where the tensor ends. The rest of
// such a stage keeps what it had: rows of D depend only on their own row of A, columns on theirs of
// B, and what is outside of D is not stored.
struct fp8_gemm_1d2d_args {
    // e4m3 [rows of A, shape_k]: boxes of 128 channels, 128-byte swizzle; [0] BLOCK_M / CLUSTER_N
    // rows, the others for parts of that: dense [1] those at the edge, grouped powers of two
    TensorMap tensor_map_a[4];
    // e4m3 [groups * shape_n, shape_k]: boxes of 128 channels, 128-byte swizzle; [0] BLOCK_N /
    // CLUSTER_M rows, [1] those at the edge
    TensorMap tensor_map_b[2];
    // float32 [k-blocks, rows of A], GROUP_COUNTS: for each group; boxes of one k-block, [0] BLOCK_M
    // scales, [1] dense: those at the edge, to a multiple of 4
    TensorMap tensor_map_sfa[2];
    // bf16 [rows of A, shape_n]: boxes of 16 rows x SLAB_N columns, swizzle of their width
    TensorMap tensor_map_d;
    // float32, group g, row i and k-block b at sfb[g * sfb_stride_group + i * sfb_stride_n +
    // b * sfb_stride_k]
    const float* sfb;
    uint32_t sfb_stride_group;
    uint32_t sfb_stride_n;
    uint32_t sfb_stride_k;
    uint32_t shape_m;         // rows of A and D (of one group, where each has its own)
    uint32_t shape_n;         // rows of one group's B, columns of D
    uint32_t shape_k;         // channels
    uint32_t raster_m;        // height of a raster band, in clusters
    uint32_t is_b_read_once;  // by one tile each of its rows: L2 need not keep them
    // Grouped kernels only.
    uint32_t d_stride;  // of rows, in elements
    uint16_t* d;
    GroupedRows rows;
};
