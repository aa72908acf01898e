// What all CUDA C++ kernels share: BF16 pairs, E4M3 codes, scales, memory accesses. cuda_lib.py puts it before a source.
//
// Same bits as kernels/scales.py. BF16 travels in pairs (low half first) in 32-bit registers. Magnitudes are compared
// as integers (15 low bits of BF16), which orders NaN over Inf over finite numbers. POW2 is a macro of every kernel.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define ALL_LANES 0xffffffffu
#define MAGNITUDES 0x7fff7fffu

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
    return out;
}

__device__ __forceinline__ float round_bf16(float x) { return low(pack_bf16(x, 0.f)); }

// Products and sums of BF16 pairs, rounded once: what FP32 arithmetic and a rounding to BF16 give (24 >= 2 * 8 + 2 bits).
__device__ __forceinline__ u32 mul_bf16(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ u32 add_bf16(u32 a, u32 b) {
    u32 out;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

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

// 16 bytes that are read once: past the L1. Zeros where not `ok`.
__device__ __forceinline__ uint4 load16(const void* at, bool ok) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (ok)
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

// The same of memory that nobody writes during the launch.
__device__ __forceinline__ uint4 load16_const(const void* at, bool ok) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (ok)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// 16 bytes into this thread's own place in shared memory, without waiting; nothing where not `ok`.
__device__ __forceinline__ void fetch16(uint4* to, const void* at, bool ok) {
    const u32 place = (u32)__cvta_generic_to_shared(to);
    if (ok) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(place), "l"(at) : "memory");
}

// Fetches come in groups: one for each call of `end_group`; at most `PENDING` groups are still on their way.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" : : : "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_groups() {
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]

__device__ __forceinline__ u32 load_acquire(const u32* at) {
    u32 v;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

// Philox-4x32-10 (Salmon et al., SC'11) of counter (counter, word2, word3) and key (seed, 0): 8 times 16 bits.
__device__ __forceinline__ uint4 philox(u64 counter, u32 word2, u32 word3, u32 seed) {
    uint4 c = make_uint4((u32)counter, (u32)(counter >> 32), word2, word3);
    u32 k0 = seed, k1 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 a = (u64)c.x * 0xd2511f53u, b = (u64)c.z * 0xcd9e8d57u;
        c = make_uint4((u32)(b >> 32) ^ c.y ^ k0, (u32)b, (u32)(a >> 32) ^ c.w ^ k1, (u32)a);
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
    return c;
}
