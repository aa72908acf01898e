// Quantize along rows, an activation or its RMSNorm, with every number in registers between its one read and its one
// write.
//
// A piece is 8 channels, 16 bytes; 16 neighbouring lanes hold a group of 128. ACT: a warp owns CHUNKS rows x 256
// channels. NORM: a block of WARPS warps owns consecutive rows, a lane CHUNKS pieces of each; it fetches STAGES - 1 rows
// ahead, and collects the scales of 8 rows, 32 bytes of the column-major scales, before it stores them. Maxima and, under
// pow2, exponents of two chunks share a register: the arithmetic works on both halves at once.
//
// Macros: MODE, POW2, CHUNKS, WARPS, EXACT (no piece lies outside), MIN_BLOCKS (of a multiprocessor), and for NORM:
// STAGES, RESIDUAL, BF16OUT, CODES.

#define ACT 0
#define NORM 1
#define PAIRS ((CHUNKS + 1) / 2)
#define THREADS (32 * WARPS)

struct Arguments {
    const void* x;         // BF16 [rows, cols]
    const void* residual;  // BF16 [rows, cols]
    const void* weight;    // BF16 [cols]
    void* total;           // BF16 [rows, cols], x + residual
    void* rstd;            // FP32 [rows]
    void* bf16;            // BF16 [rows, cols]
    void* codes;           // E4M3 [rows, cols]
    void* scale;           // FP32 [groups, scale_stride]
    long long x_stride, scale_stride;
    int rows, cols;
    float eps;
};

__device__ __forceinline__ u32 half_of(u32 pair, int which) { return which ? pair >> 16 : pair & 0xffffu; }

// Largest magnitudes of each chunk's group: chunk 2 k in the low half of top[k], 2 k + 1 in the high half.
__device__ __forceinline__ void group_maxima(const uint4 (&v)[CHUNKS], u32 (&top)[PAIRS]) {
    u32 m[2 * PAIRS];
    m[2 * PAIRS - 1] = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
        m[i] = max16x2(max16x2(v[i].x & MAGNITUDES, v[i].y & MAGNITUDES),
                       max16x2(v[i].z & MAGNITUDES, v[i].w & MAGNITUDES));
#pragma unroll
    for (int k = 0; k < PAIRS; ++k)
        top[k] = max16x2(__byte_perm(m[2 * k], m[2 * k + 1], 0x5410), __byte_perm(m[2 * k], m[2 * k + 1], 0x7632));
#pragma unroll
    for (int step = 1; step < 16; step *= 2)
#pragma unroll
        for (int k = 0; k < PAIRS; ++k) top[k] = max16x2(top[k], __shfl_xor_sync(ALL_LANES, top[k], step));
}

// Scale exponents (at bit 7 of each half, 8 too large) of two groups: rounded up where the mantissa is over 1.75.
__device__ __forceinline__ u32 exponents(u32 top) { return (max16x2(top, 0x04e004e0u) + 0x001f001fu) & 0xff80ff80u; }

__device__ __forceinline__ float scale_of(u32 top, int which) {
    const u32 amax = half_of(top, which);
    float scale, factor;
    block_scale(amax, scale, factor);
    return scale;
}

__device__ __forceinline__ uint2 codes_of(uint4 v, u32 top, int which) {
    uint2 codes;
    if (POW2) {
        // A power of two that BF16 holds: the product is exact (or so small that its code is 0 with either sign).
        const u32 f = __byte_perm(0x83008300u - exponents(top), 0, which ? 0x3232 : 0x1010);
        const u32 a = mul_bf16(v.x, f), b = mul_bf16(v.y, f), c = mul_bf16(v.z, f), d = mul_bf16(v.w, f);
        codes.x = pack_e4m3(low(a), high(a), low(b), high(b));
        codes.y = pack_e4m3(low(c), high(c), low(d), high(d));
    } else {
        float scale, f;
        block_scale(half_of(top, which), scale, f);
        if (half_of(top, which) >= 0x7f80u) f = 1.f;
        codes.x = pack_e4m3(scaled(low(v.x), f), scaled(high(v.x), f), scaled(low(v.y), f), scaled(high(v.y), f));
        codes.y = pack_e4m3(scaled(low(v.z), f), scaled(high(v.z), f), scaled(low(v.w), f), scaled(high(v.w), f));
    }
    return codes;
}

// Codes of groups with NaN or Inf are 0. Rare, hence a branch of its own.
__device__ __forceinline__ void clear_nonfinite(uint4 (&v)[CHUNKS], const u32 (&top)[PAIRS]) {
    u32 all = top[0];
#pragma unroll
    for (int k = 1; k < PAIRS; ++k) all = max16x2(all, top[k]);
    if (max(all & 0xffffu, all >> 16) < 0x7f80u) return;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
        if (half_of(top[i / 2], i & 1) >= 0x7f80u) v[i] = make_uint4(0, 0, 0, 0);
}

#if MODE == ACT
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) act_quant(const __grid_constant__ Arguments a) {
    const int lane = threadIdx.x & 31, across = (a.cols + 255) / 256, index = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int row = index / across * CHUNKS, segment = index % across, piece = segment * 32 + lane;
    const bool inside = EXACT || 8 * piece < a.cols;
    if (row >= a.rows) return;
    const long long at = (long long)row * a.x_stride + 8 * piece, to = (long long)row * a.cols + 8 * piece;
    uint4 v[CHUNKS];
    u32 top[PAIRS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
        v[i] = load16_const((const char*)a.x + 2 * (at + i * a.x_stride), inside && row + i < a.rows);
    group_maxima(v, top);
    clear_nonfinite(v, top);
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        if (inside && row + i < a.rows)
            *(uint2*)((char*)a.codes + to + (long long)i * a.cols) = codes_of(v[i], top[i / 2], i & 1);
        if ((lane & 15) == i) mine = half_of(top[i / 2], i & 1);
    }
    const int r = row + (lane & 15), group = segment * 2 + (lane >> 4);
    if ((lane & 15) < CHUNKS && r < a.rows && (EXACT || group * 128 < a.cols))
        ((float*)a.scale)[group * a.scale_stride + r] = scale_of(mine, 0);
}
#else
#define GROUPS (2 * WARPS * CHUNKS)

struct Shared {
    double sums[2][WARPS];
    float scales[2][8][GROUPS + 4];  // of 8 rows while they are collected, and of the 8 before
};

__device__ __forceinline__ bool holds(const Arguments& a, int i) {
    return EXACT || 8 * (int)(i * THREADS + threadIdx.x) < a.cols;
}

// Where the block's thread keeps piece i of a stage.
__device__ __forceinline__ uint4* place(uint4* ring, int stage, int i) {
    return ring + (stage * (1 + RESIDUAL) * CHUNKS + i) * THREADS + threadIdx.x;
}

__device__ __forceinline__ void fetch_row(const Arguments& a, uint4* ring, int row, int end, int stage) {
    const long long at = 2 * ((long long)row * a.cols + 8 * threadIdx.x);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        const bool ok = row < end && holds(a, i);
        fetch16(place(ring, stage, i), (const char*)a.x + at + i * 16 * THREADS, ok);
        if (RESIDUAL) fetch16(place(ring, stage, CHUNKS + i), (const char*)a.residual + at + i * 16 * THREADS, ok);
    }
    end_group();
}

// Store the scales of rows base .. base + 7, as far as they are the block's.
__device__ __forceinline__ void store_scales(const Arguments& a, const Shared& sm, int base, int begin, int end) {
    for (int index = threadIdx.x; index < 8 * GROUPS; index += THREADS) {
        const int group = index / 8, row = base + index % 8;
        if (row >= begin && row < end && (EXACT || group * 128 < a.cols))
            ((float*)a.scale)[group * a.scale_stride + row] = sm.scales[base >> 3 & 1][index % 8][group];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) norm_quant(const __grid_constant__ Arguments a) {
    DYNAMIC_SHARED(uint4, ring);
    __shared__ Shared sm;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int each = a.rows / gridDim.x, more = a.rows % gridDim.x, block = blockIdx.x;
    const int begin = block * each + min(block, more), end = begin + each + (block < more);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch_row(a, ring, begin + s, end, s);
    uint4 weight[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) weight[i] = load16_const((const uint4*)a.weight + i * THREADS + threadIdx.x, holds(a, i));

    int stage = 0;
    for (int row = begin; row < end; ++row) {
        const long long at = (long long)row * a.cols + 8 * threadIdx.x;
        wait_groups<STAGES - 2>();
        uint4 v[CHUNKS];
        double sum = 0.;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            v[i] = make_uint4(0, 0, 0, 0);
            if (holds(a, i)) {
                v[i] = *place(ring, stage, i);
                if (RESIDUAL) {
                    v[i] = add8(v[i], *place(ring, stage, CHUNKS + i));
                    *(uint4*)((char*)a.total + 2 * at + i * 16 * THREADS) = v[i];
                }
            }
            sum += sum_of_squares(v[i]);
        }
        sum = sum_of_lanes(sum);
        if (lane == 0) sm.sums[row & 1][warp] = sum;
        __syncthreads();
        // Into the place of the row before this one, which every thread has read.
        fetch_row(a, ring, row + STAGES - 1, end, stage == 0 ? STAGES - 1 : stage - 1);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        if (CODES && row % 8 == 0 && row > begin) store_scales(a, sm, row - 8, begin, end);
        sum = 0.;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += sm.sums[row & 1][w];
        const float rstd = reciprocal_rms(sum, a.cols, a.eps);
        if (threadIdx.x == 0) ((float*)a.rstd)[row] = rstd;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            v[i] = make_uint4(norm_pair(v[i].x, weight[i].x, rstd), norm_pair(v[i].y, weight[i].y, rstd),
                              norm_pair(v[i].z, weight[i].z, rstd), norm_pair(v[i].w, weight[i].w, rstd));
            if (BF16OUT && holds(a, i)) *(uint4*)((char*)a.bf16 + 2 * at + i * 16 * THREADS) = v[i];
        }
#if CODES
        u32 top[PAIRS];
        group_maxima(v, top);
        clear_nonfinite(v, top);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (holds(a, i)) *(uint2*)((char*)a.codes + at + i * 8 * THREADS) = codes_of(v[i], top[i / 2], i & 1);
        // Lane l of each half warp keeps the scale of chunk l.
#pragma unroll
        for (int base = 0; base < CHUNKS; base += 16) {
            u32 mine = 0;
#pragma unroll
            for (int i = base; i < CHUNKS && i < base + 16; ++i)
                if ((lane & 15) == i - base) mine = half_of(top[i / 2], i & 1);
            const int chunk = base + (lane & 15);
            if (chunk < CHUNKS) sm.scales[row >> 3 & 1][row & 7][2 * (warp + WARPS * chunk) + (lane >> 4)] = scale_of(mine, 0);
        }
#endif
    }
    __syncthreads();
    if (CODES && begin < end) store_scales(a, sm, (end - 1) / 8 * 8, begin, end);
}
#endif
