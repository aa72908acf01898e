// Quantize along rows with every number in registers from its one read to its one write: no shared memory but for the
// sum of a row that several warps hold.
//
// ACT: a warp owns CHUNKS rows x 256 channels. NORM: WARPS warps own a row, each lane CHUNKS pieces of it; a block has
// ROWS rows. A piece is 8 channels, 16 bytes; 16 neighbouring lanes hold a group of 128. Maxima and, under pow2, exponents
// of two chunks share a register: the arithmetic works on both halves at once.
//
// (Rows fetched ahead through shared memory, with scales collected for 8 rows, were slower: NORM is bound by its
// arithmetic as much as by memory.)
//
// Macros: MODE, POW2, CHUNKS, WARPS, ROWS, EXACT (no piece lies outside), MIN_BLOCKS (of a multiprocessor), and for NORM:
// RESIDUAL, BF16OUT, CODES.

#define ACT 0
#define NORM 1
#define PAIRS ((CHUNKS + 1) / 2)

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
    double inverse;  // 1 / cols
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
// Of rows row .. row + CHUNKS - 1; WHOLE: all of them exist.
template <bool WHOLE>
__device__ __forceinline__ void quantize_rows(const Arguments& a, int row, int segment) {
    const int lane = threadIdx.x & 31, piece = segment * 32 + lane;
    const bool inside = EXACT || 8 * piece < a.cols;
    const long long at = (long long)row * a.x_stride + 8 * piece, to = (long long)row * a.cols + 8 * piece;
    uint4 v[CHUNKS];
    u32 top[PAIRS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
        v[i] = load16_const((const char*)a.x + 2 * (at + i * a.x_stride), inside && (WHOLE || row + i < a.rows));
    group_maxima(v, top);
    clear_nonfinite(v, top);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
        if (inside && (WHOLE || row + i < a.rows))
            *(uint2*)((char*)a.codes + to + (long long)i * a.cols) = codes_of(v[i], top[i / 2], i & 1);
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
        if ((lane & 15) == i) mine = half_of(top[i / 2], i & 1);
    const int r = row + (lane & 15), group = segment * 2 + (lane >> 4);
    if ((lane & 15) < CHUNKS && (WHOLE || r < a.rows) && (EXACT || group * 128 < a.cols))
        ((float*)a.scale)[group * a.scale_stride + r] = scale_of(mine, 0);
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS * ROWS, MIN_BLOCKS) row_quant(const __grid_constant__ Arguments a) {
    const int warp = threadIdx.x >> 5;
#if MODE == ACT
    const int across = (a.cols + 255) / 256, index = blockIdx.x * ROWS + warp, row = index / across * CHUNKS;
    if (row + CHUNKS <= a.rows)
        quantize_rows<true>(a, row, index % across);
    else if (row < a.rows)
        quantize_rows<false>(a, row, index % across);
#else
    const int lane = threadIdx.x & 31;
    uint4 v[CHUNKS];
    u32 top[PAIRS];
    const int part = warp % WARPS, row = blockIdx.x * ROWS + warp / WARPS, first = part * 32 + lane;
    const bool live = row < a.rows;
    if (WARPS == 1 && !live) return;
    const long long at = (long long)row * a.cols + 8 * first;
    bool ok[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
        ok[i] = (WARPS == 1 || live) && (EXACT || 8 * (first + i * 32 * WARPS) < a.cols);
    const char* x = (const char*)a.x + 2 * at;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) v[i] = load16_const(x + i * 512 * WARPS, ok[i]);
#if RESIDUAL
    const char* residual = (const char*)a.residual + 2 * at;
    uint4 added[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) added[i] = load16_const(residual + i * 512 * WARPS, ok[i]);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        v[i] = add8(v[i], added[i]);
        if (ok[i]) *(uint4*)((char*)a.total + 2 * at + i * 512 * WARPS) = v[i];
    }
#endif
    double sum = 0.;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) sum += sum_of_squares(v[i]);
    sum = sum_of_lanes(sum);
#if WARPS > 1
    __shared__ double sums[ROWS * WARPS];
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0.;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[warp - part + w];
    if (!live) return;
#endif
    const float rstd = reciprocal_rms(sum, a.inverse, a.eps);
    if (first == 0) ((float*)a.rstd)[row] = rstd;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        uint4 w = make_uint4(0, 0, 0, 0);
        if (EXACT || ok[i]) w = __ldg((const uint4*)a.weight + first + i * 32 * WARPS);
        v[i] = make_uint4(norm_pair(v[i].x, w.x, rstd), norm_pair(v[i].y, w.y, rstd), norm_pair(v[i].z, w.z, rstd),
                          norm_pair(v[i].w, w.w, rstd));
        if (BF16OUT && ok[i]) *(uint4*)((char*)a.bf16 + 2 * at + i * 512 * WARPS) = v[i];
    }
#if CODES
    group_maxima(v, top);
    clear_nonfinite(v, top);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
        if (ok[i]) *(uint2*)((char*)a.codes + at + i * 256 * WARPS) = codes_of(v[i], top[i / 2], i & 1);
    // Lane l of each half warp stores the scale of chunk l.
#pragma unroll
    for (int base = 0; base < CHUNKS; base += 16) {
        u32 mine = 0;
#pragma unroll
        for (int i = base; i < CHUNKS && i < base + 16; ++i)
            if ((lane & 15) == i - base) mine = half_of(top[i / 2], i & 1);
        const int chunk = base + (lane & 15), group = 2 * (part + WARPS * chunk) + (lane >> 4);
        if (chunk < CHUNKS && (EXACT || group * 128 < a.cols))
            ((float*)a.scale)[group * a.scale_stride + row] = scale_of(mine, 0);
    }
#endif
#endif
}
