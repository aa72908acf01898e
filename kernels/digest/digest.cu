// The digest of reference.py at the speed of reading, whatever the alignment.
//
// digest = sum over words of C[word] * sum over rows of R[row] * value: a thread stays with 16 bytes of a row (a piece,
// aligned in memory) and goes down EACH rows, so that a word costs two multiply-adds, by the low and by the high half of
// the row's key. Column keys enter once, at the end.
//
// A piece need not start on a word of the global row: its 16 bytes, shifted by up to 3 bytes, then cover 5 words. How
// far depends on the row's address modulo 16, so a thread takes every PERIOD-th row, on which that is the same. Bytes of
// a piece that lie outside of the row are masked; an aligned piece with one valid byte can be read whole.
//
// Macros: SHIFTED (some piece does not start on a word), EACH, UNROLL (rows loaded at a time).

#define WORDS (4 + SHIFTED)
#define ONES 0x01010101u

struct Arguments {
    const unsigned char* t;  // [rows, count] bytes
    u64* out;                // added to
    long long stride;        // bytes from row to row
    long long row0, first;   // global row, and byte offset in it, of the first byte
    long long count;         // bytes in a row
    u32 rows, pieces, period;
};

__device__ __forceinline__ u64 key(long long position, u64 seed) {
    u64 x = (u64)(position + 1) * 0x9e3779b97f4a7c15ull + seed;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return (x ^ (x >> 31)) | 1;
}

// The words of the global row that a piece covers: its bytes moved up by `bits`.
__device__ __forceinline__ void words_of(const u32 (&v)[4], u32 bits, u32 (&w)[WORDS]) {
#if SHIFTED
    w[0] = v[0] << bits;
    w[1] = __funnelshift_l(v[0], v[1], bits), w[2] = __funnelshift_l(v[1], v[2], bits);
    w[3] = __funnelshift_l(v[2], v[3], bits), w[4] = __funnelshift_l(v[3], 0, bits);
#else
    w[0] = v[0], w[1] = v[1], w[2] = v[2], w[3] = v[3];
#endif
}

__device__ __forceinline__ u64 digest_of_thread(const Arguments& a, u32 block) {
    const u32 index = block * 256 + threadIdx.x, piece = index % a.pieces, rest = index / a.pieces;
    const u32 start = rest % a.period + rest / a.period * a.period * EACH;
    if (start >= a.rows) return 0;
    const unsigned char* row = a.t + start * a.stride;
    const int phase = (int)((u64)row & 15);
    const long long from = 16ll * piece - phase;  // of the piece, in the row's bytes
    if (from >= a.count) return 0;
    u32 mask[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        mask[k] = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b)
            if (from + 4 * k + b >= 0 && from + 4 * k + b < a.count) mask[k] |= 0xffu << (8 * b);
    }
    const long long place = a.first + from, word = place >> 2;
    const u32 bits = 8 * (u32)(place & 3);

    u64 wide[WORDS], keys = 0;
    u32 upper[WORDS];
#pragma unroll
    for (int k = 0; k < WORDS; ++k) wide[k] = 0, upper[k] = 0;
    const unsigned char* at = row + from;
    const long long step = a.stride * a.period;
    for (int k = 0; k < EACH; k += UNROLL) {
        uint4 v[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) v[i] = load16_const(at + (k + i) * step, start + (k + i) * a.period < a.rows);
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u32 r = start + (k + i) * a.period;
            const u64 row_key = r < a.rows ? key(a.row0 + r, 0x243f6a8885a308d3ull) : 0;
            const u32 part[4] = {v[i].x & mask[0], v[i].y & mask[1], v[i].z & mask[2], v[i].w & mask[3]};
            u32 w[WORDS];
            words_of(part, bits, w);
            keys += row_key;
#pragma unroll
            for (int j = 0; j < WORDS; ++j) wide[j] += (u64)w[j] * (u32)row_key, upper[j] += w[j] * (u32)(row_key >> 32);
        }
    }
    // Every byte counts one more than its value.
    const u32 ones[4] = {mask[0] & ONES, mask[1] & ONES, mask[2] & ONES, mask[3] & ONES};
    u32 w[WORDS];
    words_of(ones, bits, w);
    u64 total = 0;
#pragma unroll
    for (int j = 0; j < WORDS; ++j)
        total += (wide[j] + ((u64)upper[j] << 32) + w[j] * keys) * key(word + j, 0x13198a2e03707344ull);
    return total;
}

__device__ __forceinline__ void add_block(const Arguments& a, u32 block) {
    __shared__ u64 sums[8];
    u64 total = digest_of_thread(a, block);
#pragma unroll
    for (int step = 16; step; step /= 2) total += __shfl_xor_sync(ALL_LANES, total, step);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = total;
    __syncthreads();
    if (threadIdx.x) return;
#pragma unroll
    for (int w = 1; w < 8; ++w) total += sums[w];
    atomicAdd(a.out, total);  // modulo 2**64: the order does not matter
}

extern "C" __global__ void __launch_bounds__(256) digest(const __grid_constant__ Arguments a) { add_block(a, blockIdx.x); }

struct Many {
    const Arguments* parts;
    const uint2* blocks;  // for each block its part, and its number within
};

extern "C" __global__ void __launch_bounds__(256) digest_many(const __grid_constant__ Many m) {
    const uint2 block = m.blocks[blockIdx.x];
    const Arguments a = m.parts[block.x];
    add_block(a, block.y);
}
