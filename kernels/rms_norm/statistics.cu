// The reciprocal RMS of a row that a warp (or several) reads in 16-byte pieces, piece p by lane p % 32.
//
// Eight neighbours are summed in order in FP32 (squares of BF16 are exact there), the eights in FP64: each lane's in the
// order of the pieces, then the lanes'. Every kernel that norms adds in this order.

__device__ __forceinline__ double sum_of_squares(uint4 v) {
    float e = __fmul_rn(low(v.x), low(v.x));
    e = __fmaf_rn(high(v.x), high(v.x), e);
    e = __fmaf_rn(low(v.y), low(v.y), e), e = __fmaf_rn(high(v.y), high(v.y), e);
    e = __fmaf_rn(low(v.z), low(v.z), e), e = __fmaf_rn(high(v.z), high(v.z), e);
    e = __fmaf_rn(low(v.w), low(v.w), e), e = __fmaf_rn(high(v.w), high(v.w), e);
    return (double)e;
}

__device__ __forceinline__ double sum_of_lanes(double sum) {
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    return sum;
}

__device__ __forceinline__ float reciprocal_rms(double sum, double inverse, float eps) {
    return __fdiv_rn(1.f, __fsqrt_rn((float)(sum * inverse) + eps));
}

__device__ __forceinline__ uint4 add8(uint4 x, uint4 y) {
    return make_uint4(add_bf16(x.x, y.x), add_bf16(x.y, y.y), add_bf16(x.z, y.z), add_bf16(x.w, y.w));
}

__device__ __forceinline__ u32 norm_pair(u32 x, u32 weight, float rstd) {
    return mul_bf16(pack_bf16(low(x) * rstd, high(x) * rstd), weight);
}
