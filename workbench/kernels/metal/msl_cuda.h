// What Metal kernel bodies use, as CUDA: the header of every body that mx.fast.cuda_kernel compiles. Address-space
// words are taken out of the text before (see source.py). Launches are one-dimensional, threadgroups whole SIMD groups.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char msl_uchar;
typedef unsigned short msl_ushort;
typedef unsigned int msl_uint;
typedef unsigned long long msl_ulong;
#define uchar msl_uchar
#define ushort msl_ushort
#define uint msl_uint
#define ulong msl_ulong
typedef __nv_bfloat16 bfloat;

#define METAL_FUNC __device__ __forceinline__

template <class To, class From>
struct msl_bits {
  static __device__ __forceinline__ To of(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
    union Both {
      From from;
      To to;
      __device__ Both() {}
    } both;
    both.from = from;
    return both.to;
  }
};
template <>
struct msl_bits<float, msl_uint> {
  static __device__ __forceinline__ float of(msl_uint from) { return __uint_as_float(from); }
};
template <>
struct msl_bits<msl_uint, float> {
  static __device__ __forceinline__ msl_uint of(float from) { return __float_as_uint(from); }
};
template <>
struct msl_bits<__half, msl_ushort> {
  static __device__ __forceinline__ __half of(msl_ushort from) { return __ushort_as_half(from); }
};
template <class To, class From>
__device__ __forceinline__ To as_type(From from) {
  return msl_bits<To, From>::of(from);
}

#define threadgroup_barrier(...) __syncthreads()
#define simdgroup_barrier(...) __syncwarp()

template <class T>
__device__ __forceinline__ T simd_shuffle_xor(T value, msl_uint mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T>
__device__ __forceinline__ T simd_broadcast(T value, msl_uint lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <class T>
__device__ __forceinline__ T simd_sum(T value) {  // pairs at distance 1, 2, 4, 8, 16
#pragma unroll
  for (int step = 1; step < 32; step *= 2) value = value + __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}
template <class T>
__device__ __forceinline__ T simd_prefix_exclusive_sum(T value) {
  const int lane = threadIdx.x & 31;
  T sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T below = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum = sum + below;
  }
  return sum - value;
}
__device__ __forceinline__ msl_uint popcount(msl_uint word) { return __popc(word); }

#define threads_per_simdgroup 32u
#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threads_per_threadgroup blockDim
#define threadgroups_per_grid gridDim
#define thread_index_in_threadgroup threadIdx.x
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)
#define simdgroups_per_threadgroup (blockDim.x >> 5)
