// Backward of RMSNorm, one read of dY and X and one write of dX, dW summed in registers over the rows of a block.
//
// A block owns whole rows: every gridDim.x-th. A thread holds PIECES pieces of 8 channels, and fetches those of the next
// STAGES - 1 rows into places of its own in shared memory. One barrier for each row, where the warps' dot products meet.
// The order of every sum depends on H and the size of the grid, which the caller fixes.
//
// Macros: PIECES, WARPS, STAGES, RESIDUAL, EXACT (no piece lies outside), MIN_BLOCKS (of a multiprocessor).

#define THREADS (32 * WARPS)

struct Arguments {
    const void* dy;       // BF16 [rows, cols]
    const void* x;        // BF16 [rows, cols]
    const void* weight;   // BF16 [cols]
    const void* rstd;     // FP32 [rows]
    const void* d_total;  // BF16 [rows, cols], added to dX after its rounding
    void* dx;             // BF16 [rows, cols]
    void* partial;        // FP32 [gridDim.x, cols]
    int rows, cols;
};

__device__ __forceinline__ bool holds(const Arguments& a, int i) {
    return EXACT || 8 * (int)(i * THREADS + threadIdx.x) < a.cols;
}

// Where this thread keeps piece i of input k (x, dy, d_total) of a stage.
__device__ __forceinline__ uint4* place(uint4* ring, int stage, int k, int i) {
    return ring + ((stage * (2 + RESIDUAL) + k) * PIECES + i) * THREADS + threadIdx.x;
}

__device__ __forceinline__ void fetch_row(const Arguments& a, uint4* ring, int row, int stage) {
    const long long at = 2 * ((long long)row * a.cols + 8 * threadIdx.x);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const bool ok = row < a.rows && holds(a, i);
        fetch16(place(ring, stage, 0, i), (const char*)a.x + at + i * 16 * THREADS, ok);
        fetch16(place(ring, stage, 1, i), (const char*)a.dy + at + i * 16 * THREADS, ok);
        if (RESIDUAL) fetch16(place(ring, stage, 2, i), (const char*)a.d_total + at + i * 16 * THREADS, ok);
    }
    end_group();
}

__device__ __forceinline__ void unpack(uint4 v, float (&f)[8]) {
    f[0] = low(v.x), f[1] = high(v.x), f[2] = low(v.y), f[3] = high(v.y);
    f[4] = low(v.z), f[5] = high(v.z), f[6] = low(v.w), f[7] = high(v.w);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) norm_backward(const __grid_constant__ Arguments a) {
    DYNAMIC_SHARED(uint4, ring);
    __shared__ float sums[2][WARPS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch_row(a, ring, blockIdx.x + s * gridDim.x, s);
    float weight[PIECES][8], dw[PIECES][8];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        unpack(load16_const((const uint4*)a.weight + i * THREADS + threadIdx.x, holds(a, i)), weight[i]);
#pragma unroll
        for (int k = 0; k < 8; ++k) dw[i][k] = 0.f;
    }
    const float* all_rstd = (const float*)a.rstd;
    float rstd_next = __ldg(all_rstd + blockIdx.x);
    int stage = 0, parity = 0;
    for (int row = blockIdx.x; row < a.rows; row += gridDim.x, parity ^= 1) {
        const long long at = 2 * ((long long)row * a.cols + 8 * threadIdx.x);
        const float rstd = rstd_next;
        if (row + gridDim.x < a.rows) rstd_next = __ldg(all_rstd + row + gridDim.x);
        wait_groups<STAGES - 2>();
        uint4 x_row[PIECES], dy_row[PIECES], d_total[PIECES];
        float dot[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            x_row[i] = dy_row[i] = d_total[i] = make_uint4(0, 0, 0, 0);
            if (holds(a, i)) {
                x_row[i] = *place(ring, stage, 0, i), dy_row[i] = *place(ring, stage, 1, i);
                if (RESIDUAL) d_total[i] = *place(ring, stage, 2, i);
            }
            float x[8], dy[8];
            unpack(x_row[i], x), unpack(dy_row[i], dy);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const float normed = x[k] * rstd;
                dot[k & 1] += dy[k] * weight[i][k] * normed;
                dw[i][k] += dy[k] * normed;
            }
        }
        float mean = dot[0] + dot[1];
#pragma unroll
        for (int step = 16; step; step /= 2) mean += __shfl_xor_sync(ALL_LANES, mean, step);
        if (lane == 0) sums[parity][warp] = mean;
        __syncthreads();
        // Into the place of the row before this one.
        fetch_row(a, ring, row + (STAGES - 1) * gridDim.x, stage == 0 ? STAGES - 1 : stage - 1);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        mean = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) mean += sums[parity][w];
        mean = __fdiv_rn(mean, (float)a.cols);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            float x[8], dy[8];
            unpack(x_row[i], x), unpack(dy_row[i], dy);
#pragma unroll
            for (int k = 0; k < 8; ++k) x[k] = rstd * (dy[k] * weight[i][k] - x[k] * rstd * mean);
            uint4 dx = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
            if (RESIDUAL) dx = add8(dx, d_total[i]);
            if (holds(a, i)) *(uint4*)((char*)a.dx + at + i * 16 * THREADS) = dx;
        }
    }
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        if (!holds(a, i)) continue;
        float4* to = (float4*)((float*)a.partial + (long long)blockIdx.x * a.cols + 8 * (i * THREADS + threadIdx.x));
        to[0] = make_float4(dw[i][0], dw[i][1], dw[i][2], dw[i][3]);
        to[1] = make_float4(dw[i][4], dw[i][5], dw[i][6], dw[i][7]);
    }
}

struct SumArguments {
    const void* partial;  // FP32 [parts, cols]
    void* dw;             // FP32 [cols]
    int parts, cols;
};

// A block of 16 warps sums 32 channels: each warp every 16th part, then the warps in order.
extern "C" __global__ void __launch_bounds__(512) sum_parts(const __grid_constant__ SumArguments a) {
    __shared__ float sums[16][32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, c = blockIdx.x * 32 + lane;
    float sum = 0.f;
    if (c < a.cols)
#pragma unroll 8
        for (int part = warp; part < a.parts; part += 16) sum += ((const float*)a.partial)[(long long)part * a.cols + c];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || c >= a.cols) return;
    sum = 0.f;
#pragma unroll
    for (int w = 0; w < 16; ++w) sum += sums[w][lane];
    ((float*)a.dw)[c] = sum;
}
