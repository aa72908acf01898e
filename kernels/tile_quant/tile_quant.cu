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
// Same bits as kernels/quant_act/reference.py. Magnitudes are compared as integers (15 low bits of BF16), which orders
// NaN over Inf over finite numbers. Compile-time switches (macros): MODE, POW2, ROW, COL, BF16OUT,
// MIN_BLOCKS (of a multiprocessor), RUN (below).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define IDENTITY 0
#define NORM 1
#define SWIGLU 2
#define SWIGLU_BACKWARD 3
#define WEIGHT 4

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
    return out;
}

__device__ __forceinline__ float round_bf16(float x) { return low(pack_bf16(x, 0.f)); }

__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
    u16 lo, hi;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(d), "f"(c));
    return (u32)lo | ((u32)hi << 16);
}

__device__ __forceinline__ u32 max16x2(u32 a, u32 b) { return __vmaxu2(a, b); }

// Scale from the largest magnitude (BF16 bits), and what a value is multiplied by (pow2) or divided by (fp32).
__device__ __forceinline__ void block_scale(u32 amax, float& scale, float& factor) {
    const u32 floor_bits = (9u << 23) | 0x600000u;  // 448 * 2**-126
    u32 bits = max(amax << 16, floor_bits);
    if (POW2) {
        u32 exponent = (bits >> 23) - 8 + ((bits & 0x7fffffu) > 0x600000u);
        scale = __uint_as_float(exponent << 23);
        factor = __uint_as_float((254u - exponent) << 23);
    } else {
        scale = __fdiv_rn(__uint_as_float(bits), 448.f);
        factor = scale;
    }
    if (amax >= 0x7f80u) scale = __uint_as_float(0x7fc00000u);
}

__device__ __forceinline__ float scaled(float x, float factor) { return POW2 ? x * factor : __fdiv_rn(x, factor); }

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
    const void* x;        // BF16 [rows, cols]; gate_up [rows, 2 half] of SWIGLU*
    const void* dy;       // BF16 [rows, half] of SWIGLU_BACKWARD
    const void* weight;   // BF16 [cols] of NORM
    const void* rstd;     // FP32 [rows] of NORM
    void* bf16;           // BF16 [rows, cols]
    void* codes;          // E4M3 [rows, cols]
    void* scale;          // FP32 [groups, scale_stride]
    void* codes_t;        // E4M3 [cols, t_stride]
    void* scale_t;        // FP32 [token groups, cols]
    long long x_stride, dy_stride, scale_stride, t_stride;
    int rows, cols, half, tiles_t, tiles_c;
};

// Which tile a block owns: bands of RUN token groups, channel by channel, so that blocks that run together share both
// rows of the input and rows of the transposed output. NORM goes backwards: the pass before it, which found rstd, left the
// last rows in the L2.
__device__ __forceinline__ void tile_of_block(const Arguments& a, int& tile_t, int& tile_c) {
    const int block = MODE == NORM ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int band = block / (RUN * a.tiles_c);
    const int inside = block - band * RUN * a.tiles_c;
    const int height = min(RUN, a.tiles_t - band * RUN);
    tile_c = inside / height;
    tile_t = band * RUN + inside - tile_c * height;
}

__device__ __forceinline__ uint4 load16(const void* base, long long offset, bool ok) {
    if (!ok) return make_uint4(0, 0, 0, 0);
    uint4 v;
    const void* at = (const char*)base + 2 * offset;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ u32 norm_pair(u32 x, u32 w, float rstd) {
    return pack_bf16(round_bf16(low(x) * rstd) * low(w), round_bf16(high(x) * rstd) * high(w));
}

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
        top[j] = max16x2(top[j], __shfl_xor_sync(0xffffffffu, top[j], 16));
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
    tile_of_block(a, tile_t, tile_c);
    const int c0 = tile_c * 128 + (threadIdx.x & 15) * 8, r0 = tile_t * 128 + (threadIdx.x >> 4) * 8;
    // Of SWIGLU_BACKWARD tiles_c counts the tiles of one half.
    const bool c_ok = c0 < (MODE == SWIGLU_BACKWARD ? a.half : a.cols);
    u32 v[8][4];
#if MODE == SWIGLU_BACKWARD
    u32 w[8][4];
#endif
    uint4 weight = make_uint4(0, 0, 0, 0);
    if (MODE == NORM) weight = load16(a.weight, c0, c_ok);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int r = r0 + i;
        const bool ok = c_ok && r < a.rows;
        const long long at = (long long)r * a.x_stride + c0;
        const uint4 x = load16(a.x, at, ok);
#if MODE == NORM
        const float rstd = ok ? ((const float*)a.rstd)[r] : 0.f;
        v[i][0] = norm_pair(x.x, weight.x, rstd), v[i][1] = norm_pair(x.y, weight.y, rstd);
        v[i][2] = norm_pair(x.z, weight.z, rstd), v[i][3] = norm_pair(x.w, weight.w, rstd);
#elif MODE == SWIGLU
        const uint4 up = load16(a.x, at + a.half, ok);
        v[i][0] = swiglu_pair(x.x, up.x), v[i][1] = swiglu_pair(x.y, up.y);
        v[i][2] = swiglu_pair(x.z, up.z), v[i][3] = swiglu_pair(x.w, up.w);
#elif MODE == SWIGLU_BACKWARD
        const uint4 up = load16(a.x, at + a.half, ok);
        const uint4 dy = load16(a.dy, (long long)r * a.dy_stride + c0, ok);
        swiglu_grad_pair(dy.x, x.x, up.x, v[i][0], w[i][0]), swiglu_grad_pair(dy.y, x.y, up.y, v[i][1], w[i][1]);
        swiglu_grad_pair(dy.z, x.z, up.z, v[i][2], w[i][2]), swiglu_grad_pair(dy.w, x.w, up.w, v[i][3], w[i][3]);
#else
        v[i][0] = x.x, v[i][1] = x.y, v[i][2] = x.z, v[i][3] = x.w;
#endif
    }
    emit(a, sm, v, tile_t, tile_c);
#if MODE == SWIGLU_BACKWARD
    __syncthreads();  // the next tile's maxima and codes overwrite shared memory
    emit(a, sm, w, tile_t, tile_c + a.tiles_c);
#endif
}
