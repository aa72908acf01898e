// Produce a 128 x 128 BF16 tile and quantize it along rows and along columns, from one read of global memory.
//
// One block of 256 threads owns one tile (128 tokens x 128 channels). A thread holds 8 tokens x 8 channels, packed as
// BF16 pairs (32 registers): thread t has channels 8 (t % 16) .. + 7 and tokens 8 (t / 16) .. + 7. So a row of the tile
// is 16 neighbouring lanes with 16 bytes each, and 8 tokens of one channel, which the transposed output wants side by
// side, sit in one thread. The transposed codes pass through 16 KiB of shared memory, in 8-byte units whose position is
// XORed with the channel group: neither the writes nor the reads have bank conflicts.
//
// MODE WEIGHT has one scale for the whole tile, writes the codes as they stand and, if COL, transposed.
// SWIGLU_BACKWARD makes two tiles (of the gate's gradient and of the up projection's) from one set of loads.
//
// NORM does the statistics of a row in the same launch: blocks that find them run ahead of the blocks that own tiles, by
// so little that the tiles' inputs still lie in the L2. A tile waits until its token group is `ready`. That cannot
// deadlock while blocks start in the order of their index, which they do (CUB's single-pass scan rests on it too).
//
// WEIGHT takes the FP32 master as well, rounded to BF16 on the way, to nearest or with Philox noise.
//
// Same bits as kernels/quant_act/reference.py, quant_weight/reference.py, master_cast/reference.py. Macros: MODE, POW2,
// ROW, COL, BF16OUT, SOURCE (of WEIGHT), RESIDUAL, AHEAD and PARTS (of NORM), MIN_BLOCKS (of a multiprocessor), RUN (below).

#define IDENTITY 0
#define NORM 1
#define SWIGLU 2
#define SWIGLU_BACKWARD 3
#define WEIGHT 4

// SOURCE
#define BF16 0
#define FP32 1
#define FP32_STOCHASTIC 2

// exp and division as Triton's `tl.exp` and `/` compile, so that fused and unfused SwiGLU agree to the bit.
__device__ __forceinline__ float fast_exp(float x) {
    float out;
    asm("ex2.approx.f32 %0, %1;" : "=f"(out) : "f"(__fmul_rn(x, 1.4426950408889634f)));
    return out;
}

__device__ __forceinline__ float fast_divide(float a, float b) {
    float out;
    asm("div.full.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
}

__device__ __forceinline__ float sigmoid(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(1.f + fast_exp(-x)));
    return out;
}

__device__ __forceinline__ float silu_bf16(float g) { return round_bf16(fast_divide(g, 1.f + fast_exp(-g))); }

struct Arguments {
    const void* x;         // [rows, cols], BF16 (FP32 of WEIGHT with that SOURCE); gate_up [rows, 2 half] of SWIGLU*
    const void* dy;        // BF16 [rows, half] of SWIGLU_BACKWARD; residual [rows, cols] of NORM
    const void* weight;    // BF16 [cols] of NORM
    void* rstd;            // FP32 [rows] of NORM, written
    void* total;           // BF16 [rows, cols] of NORM with RESIDUAL, written: x + residual
    u32* ready;            // zeros [token groups] of NORM: counts the blocks that have done their rows
    void* bf16;            // BF16 [rows, cols]
    void* codes;           // E4M3 [rows, cols]
    void* scale;           // FP32 [groups, scale_stride]
    void* codes_t;         // E4M3 [cols, t_stride]
    void* scale_t;         // FP32 [token groups, cols]
    long long x_stride, dy_stride, scale_stride, t_stride;
    long long row0, col0, global_cols;  // of FP32_STOCHASTIC: place in the global tensor
    u32 seed, step, tensor_id;          // of FP32_STOCHASTIC
    int rows, cols, half, tiles_t, tiles_c;
    float eps;       // of NORM
    double inverse;  // of NORM: 1 / cols
};

// Which tile a block owns: bands of RUN token groups, channel by channel, so that blocks that run together share both
// rows of the input and rows of the transposed output.
__device__ __forceinline__ void tile_of_block(const Arguments& a, int& tile_t, int& tile_c) {
    const int band = blockIdx.x / (RUN * a.tiles_c);
    const int inside = blockIdx.x - band * RUN * a.tiles_c;
    const int height = min(RUN, a.tiles_t - band * RUN);
    tile_c = inside / height;
    tile_t = band * RUN + inside - tile_c * height;
}

#if MODE == NORM
#define BATCH (RESIDUAL ? 4 : 8)

// A band of NORM: the statistics of RUN token groups, then the tiles of the band that lies AHEAD bands back. Returns
// whether the block owns a tile; `part` is which statistics it owns otherwise. tile_t may lie outside: nothing to do.
__device__ __forceinline__ bool norm_block(const Arguments& a, int& tile_t, int& tile_c, int& part) {
    const int band = blockIdx.x / (RUN * (PARTS + a.tiles_c));
    int inside = blockIdx.x - band * RUN * (PARTS + a.tiles_c);
    part = inside % PARTS;
    tile_t = band * RUN + inside / PARTS;
    if (inside < RUN * PARTS) return false;
    inside -= RUN * PARTS;
    tile_c = inside / RUN;
    tile_t = (band - AHEAD) * RUN + inside % RUN;
    return true;
}

__device__ __forceinline__ void statistics(const Arguments& a, int tile_t, int part) {
    const int lane = threadIdx.x & 31, row = tile_t * 128 + part * 8 + (threadIdx.x >> 5), pieces = a.cols / 8;
    if (row < a.rows) {
        double sum = 0.;
        for (int first = lane; first < pieces; first += 32 * BATCH) {
            uint4 v[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int piece = first + 32 * i;
                v[i] = load16_const((const uint4*)((const u16*)a.x + row * a.x_stride) + piece, piece < pieces);
            }
#if RESIDUAL
            uint4 added[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int piece = first + 32 * i;
                added[i] = load16_const((const uint4*)((const u16*)a.dy + row * a.dy_stride) + piece, piece < pieces);
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int piece = first + 32 * i;
                v[i] = add8(v[i], added[i]);
                if (piece < pieces) ((uint4*)a.total)[(long long)row * pieces + piece] = v[i];
            }
#endif
#pragma unroll
            for (int i = 0; i < BATCH; ++i) sum += sum_of_squares(v[i]);
        }
        const float rstd = reciprocal_rms(sum_of_lanes(sum), a.inverse, a.eps);
        if (lane == 0) ((float*)a.rstd)[row] = rstd;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(a.ready + tile_t, 1u);
    }
}

__device__ __forceinline__ void wait_until_ready(const Arguments& a, int tile_t) {
    if (threadIdx.x == 0)
        while (load_acquire(a.ready + tile_t) < PARTS) __nanosleep(64);
    __syncthreads();
}
#endif

// 8 neighbours of the FP32 master as BF16 pairs.
#if MODE == WEIGHT && SOURCE != BF16
__device__ __forceinline__ u32 round_pair(float lo, float hi, u32 noise) {
    const u32 nearest = pack_bf16(lo, hi);
    if (SOURCE == FP32) return nearest;
    u32 bits[2] = {__float_as_uint(lo), __float_as_uint(hi)};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 up = bits[k] + (k ? noise >> 16 : noise & 0xffffu);
        if ((up & 0x7f800000u) == 0x7f800000u) up = bits[k];  // finite stays finite
        if ((bits[k] & 0x7f800000u) == 0x7f800000u) up = k ? nearest : nearest << 16;
        bits[k] = up;
    }
    return __byte_perm(bits[0], bits[1], 0x7632);
}

__device__ __forceinline__ uint4 load_master(const Arguments& a, int r, int c, bool ok) {
    const uint4* at = (const uint4*)((const float*)a.x + r * a.x_stride + c);
    uint4 x = make_uint4(0, 0, 0, 0), y = x, noise = x;
    if (ok) x = __ldg(at), y = __ldg(at + 1);
    if (SOURCE == FP32_STOCHASTIC) noise = philox(((a.row0 + r) * a.global_cols + a.col0 + c) >> 3, a.step, a.tensor_id, a.seed);
    return make_uint4(round_pair(__uint_as_float(x.x), __uint_as_float(x.y), noise.x),
                      round_pair(__uint_as_float(x.z), __uint_as_float(x.w), noise.y),
                      round_pair(__uint_as_float(y.x), __uint_as_float(y.y), noise.z),
                      round_pair(__uint_as_float(y.z), __uint_as_float(y.w), noise.w));
}
#endif

__device__ __forceinline__ u32 swiglu_pair(u32 gate, u32 up) {
    return pack_bf16(silu_bf16(low(gate)) * low(up), silu_bf16(high(gate)) * high(up));
}

// Gradients of a pair of gates (into the first result) and of their up projections (into the second).
__device__ __forceinline__ void swiglu_grad_pair(u32 dy, u32 gate, u32 up, u32& d_gate, u32& d_up) {
    float g[2] = {low(gate), high(gate)}, u[2] = {low(up), high(up)}, d[2] = {low(dy), high(dy)}, a[2], b[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const float s = sigmoid(g[k]), shared = d[k] * s;
        a[k] = shared * (u[k] * (1.f + g[k] * (1.f - s)));
        b[k] = shared * g[k];
    }
    d_gate = pack_bf16(a[0], a[1]), d_up = pack_bf16(b[0], b[1]);
}

struct Shared {
    __align__(16) u64 transposed[128 * 16];
    __align__(16) u16 partial[8][128];
    float factors[128];
    u32 keep[128];
};

// Quantize and store the tile held in `v`, at token group tile_t and channel group tile_c of the output.
__device__ __forceinline__ void emit(const Arguments& a, Shared& sm, const u32 (&v)[8][4], int tile_t, int tile_c) {
    const int t = threadIdx.x, lane_c = t & 15, lane_t = t >> 4, warp = t >> 5;
    const int c0 = tile_c * 128 + lane_c * 8, r0 = tile_t * 128 + lane_t * 8;
    const bool c_ok = c0 < a.cols;

    if (BF16OUT) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (c_ok && r0 + i < a.rows)
                *(uint4*)((char*)a.bf16 + 2 * ((long long)(r0 + i) * a.cols + c0)) =
                    make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
    }

    // Largest magnitude of each of this thread's channels over its 8 tokens, then over the block.
    u32 top[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        top[j] = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) top[j] = max16x2(top[j], v[i][j] & 0x7fff7fffu);
        top[j] = max16x2(top[j], __shfl_xor_sync(ALL_LANES, top[j], 16));
    }
    float tile_factor = 0.f;
    u32 tile_keep = 0;
    if (MODE == WEIGHT) {
        u32 m = max16x2(max16x2(top[0], top[1]), max16x2(top[2], top[3]));
#pragma unroll
        for (int step = 1; step < 16; step *= 2) m = max16x2(m, __shfl_xor_sync(0xffffffffu, m, step));
        if ((t & 31) == 0) sm.keep[warp] = max(m & 0xffffu, m >> 16);
        __syncthreads();
        u32 amax = 0;
#pragma unroll
        for (int w = 0; w < 8; ++w) amax = max(amax, sm.keep[w]);
        float scale;
        block_scale(amax, scale, tile_factor);
        tile_keep = amax < 0x7f80u ? 0xffffffffu : 0u;
        if (t == 0) ((float*)a.scale)[(long long)tile_t * a.scale_stride + tile_c] = scale;
    } else {
        if ((t & 31) < 16) *(uint4*)&sm.partial[warp][lane_c * 8] = make_uint4(top[0], top[1], top[2], top[3]);
        __syncthreads();
        if (t < 128) {
            u32 amax = 0;
#pragma unroll
            for (int w = 0; w < 8; ++w) amax = max(amax, (u32)sm.partial[w][t]);
            float scale, factor;
            block_scale(amax, scale, factor);
            sm.factors[t] = factor;
            sm.keep[t] = amax < 0x7f80u ? 0xffffffffu : 0u;
            const int c = tile_c * 128 + t;
            if (c < a.cols) ((float*)a.scale_t)[(long long)tile_t * a.cols + c] = scale;
        }
    }

    if (ROW) {
        float mine = 0.f;  // the scale of token r0 + lane_c, for lane_c < 8
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float f = tile_factor;
            u32 all = tile_keep;
            if (MODE != WEIGHT) {
                u32 m = max16x2(max16x2(v[i][0] & 0x7fff7fffu, v[i][1] & 0x7fff7fffu),
                                max16x2(v[i][2] & 0x7fff7fffu, v[i][3] & 0x7fff7fffu));
#pragma unroll
                for (int step = 1; step < 16; step *= 2) m = max16x2(m, __shfl_xor_sync(0xffffffffu, m, step));
                const u32 amax = max(m & 0xffffu, m >> 16);
                float scale;
                block_scale(amax, scale, f);
                if (lane_c == i) mine = scale;
                all = amax < 0x7f80u ? 0xffffffffu : 0u;
            }
            uint2 codes;
            codes.x = all & pack_e4m3(scaled(low(v[i][0]), f), scaled(high(v[i][0]), f),
                                      scaled(low(v[i][1]), f), scaled(high(v[i][1]), f));
            codes.y = all & pack_e4m3(scaled(low(v[i][2]), f), scaled(high(v[i][2]), f),
                                      scaled(low(v[i][3]), f), scaled(high(v[i][3]), f));
            if (c_ok && r0 + i < a.rows) *(uint2*)((char*)a.codes + (long long)(r0 + i) * a.cols + c0) = codes;
        }
        if (MODE != WEIGHT && lane_c < 8 && r0 + lane_c < a.rows)
            ((float*)a.scale)[tile_c * a.scale_stride + r0 + lane_c] = mine;
    }
    if (!COL) return;
    __syncthreads();

#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int c = lane_c * 8 + j;
        const float f = MODE == WEIGHT ? tile_factor : sm.factors[c];
        const u32 all = MODE == WEIGHT ? tile_keep : sm.keep[c];
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = scaled(j & 1 ? high(v[i][j / 2]) : low(v[i][j / 2]), f);
        const u32 lo = all & pack_e4m3(x[0], x[1], x[2], x[3]), hi = all & pack_e4m3(x[4], x[5], x[6], x[7]);
        sm.transposed[c * 16 + (lane_t ^ lane_c)] = (u64)lo | ((u64)hi << 32);
    }
    __syncthreads();

    // 8 lanes write the 128 tokens of a channel; a warp writes 4 channels at a time.
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) {
        const int c = pass * 32 + (t >> 3), pair = t & 7, group = c >> 3, token = tile_t * 128 + pair * 16;
        uint4 q = *(const uint4*)&sm.transposed[c * 16 + 2 * (pair ^ (group >> 1))];
        if (group & 1) q = make_uint4(q.z, q.w, q.x, q.y);
        // Only a weight's transposed rows end before the tile does; elsewhere the padding takes whole tiles.
        if (tile_c * 128 + c < a.cols && (MODE != WEIGHT || token < a.rows))
            *(uint4*)((char*)a.codes_t + (long long)(tile_c * 128 + c) * a.t_stride + token) = q;
    }
}

extern "C" __global__ void __launch_bounds__(256, MIN_BLOCKS) tile_quant(const __grid_constant__ Arguments a) {
    __shared__ Shared sm;
    int tile_t, tile_c;
#if MODE == NORM
    int part;
    const bool own_tile = norm_block(a, tile_t, tile_c, part);
    if (tile_t < 0 || tile_t >= a.tiles_t) return;
    if (!own_tile) return statistics(a, tile_t, part);
#else
    tile_of_block(a, tile_t, tile_c);
#endif
    const int c0 = tile_c * 128 + (threadIdx.x & 15) * 8, r0 = tile_t * 128 + (threadIdx.x >> 4) * 8;
    // Of SWIGLU_BACKWARD tiles_c counts the tiles of one half.
    const bool c_ok = c0 < (MODE == SWIGLU_BACKWARD ? a.half : a.cols);
    u32 v[8][4];
#if MODE == SWIGLU_BACKWARD
    u32 w[8][4];
#endif
#if MODE == NORM && RESIDUAL
    wait_until_ready(a, tile_t);
#endif
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int r = r0 + i;
        const bool ok = c_ok && r < a.rows;
        const char* at = (const char*)a.x + 2 * (r * a.x_stride + c0);
#if MODE == WEIGHT && SOURCE != BF16
        const uint4 x = load_master(a, r, c0, ok);
#elif MODE == NORM && RESIDUAL
        const uint4 x = load16((const char*)a.total + 2 * ((long long)r * a.cols + c0), ok);
#else
        const uint4 x = load16_const(at, ok);
#endif
#if MODE == SWIGLU
        const uint4 up = load16_const(at + 2 * a.half, ok);
        v[i][0] = swiglu_pair(x.x, up.x), v[i][1] = swiglu_pair(x.y, up.y);
        v[i][2] = swiglu_pair(x.z, up.z), v[i][3] = swiglu_pair(x.w, up.w);
#elif MODE == SWIGLU_BACKWARD
        const uint4 up = load16_const(at + 2 * a.half, ok);
        const uint4 dy = load16_const((const char*)a.dy + 2 * (r * a.dy_stride + c0), ok);
        swiglu_grad_pair(dy.x, x.x, up.x, v[i][0], w[i][0]), swiglu_grad_pair(dy.y, x.y, up.y, v[i][1], w[i][1]);
        swiglu_grad_pair(dy.z, x.z, up.z, v[i][2], w[i][2]), swiglu_grad_pair(dy.w, x.w, up.w, v[i][3], w[i][3]);
#else
        v[i][0] = x.x, v[i][1] = x.y, v[i][2] = x.z, v[i][3] = x.w;
#endif
    }
#if MODE == NORM
    if (!RESIDUAL) wait_until_ready(a, tile_t);
    const uint4 weight = load16_const((const u16*)a.weight + c0, c_ok);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float rstd = c_ok && r0 + i < a.rows ? __ldcg((const float*)a.rstd + r0 + i) : 0.f;
        v[i][0] = norm_pair(v[i][0], weight.x, rstd), v[i][1] = norm_pair(v[i][1], weight.y, rstd);
        v[i][2] = norm_pair(v[i][2], weight.z, rstd), v[i][3] = norm_pair(v[i][3], weight.w, rstd);
    }
#endif
    emit(a, sm, v, tile_t, tile_c);
#if MODE == SWIGLU_BACKWARD
    __syncthreads();  // the next tile's maxima and codes overwrite shared memory
    emit(a, sm, w, tile_t, tile_c + a.tiles_c);
#endif
}
