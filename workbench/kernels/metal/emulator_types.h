// Metal's types as C++: scalars, 16-bit floats, the vectors that bodies load.
#pragma once
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#if !defined(__x86_64__) && !defined(__aarch64__)
#error "the emulator switches stacks on x86-64 and arm64 only"
#endif

typedef uint8_t msl_uchar;
typedef uint16_t msl_ushort;
typedef uint32_t msl_uint;
typedef uint64_t msl_ulong;
#define uchar msl_uchar
#define ushort msl_ushort
#define uint msl_uint
#define ulong msl_ulong

namespace msl {

template <class To, class From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

inline uint16_t round_to_bfloat(float value) {
  uint32_t u = bits<uint32_t>(value);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t(u >> 16 | 0x40);
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

inline uint16_t round_to_half(float value) {
  uint32_t u = bits<uint32_t>(value), sign = u >> 16 & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (u >= 0x477ff000u) return uint16_t(sign | 0x7c00);
  if (u < 0x38800000u) {  // subnormal: adding 0.5 rounds it at the right bit
    float shifted = bits<float>(u) + 0.5f;
    return uint16_t(sign | (bits<uint32_t>(shifted) - 0x3f000000u));
  }
  u += 0xc8000fffu + (u >> 13 & 1);
  return uint16_t(sign | u >> 13);
}

inline float widen_half(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return bits<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest < 0x400u) {
    float magnitude = float(rest) * 5.9604644775390625e-8f;  // 2^-24
    return bits<float>(sign | bits<uint32_t>(magnitude));
  }
  return bits<float>(sign | ((rest << 13) + 0x38000000u));
}

}  // namespace msl

struct half {
  uint16_t word;
  half() = default;
  half(float value) : word(msl::round_to_half(value)) {}
  operator float() const { return msl::widen_half(word); }
  half& operator+=(float value) { return *this = half(float(*this) + value); }
};
struct bfloat {
  uint16_t word;
  bfloat() = default;
  bfloat(float value) : word(msl::round_to_bfloat(value)) {}
  operator float() const { return msl::bits<float>(uint32_t(word) << 16); }
  bfloat& operator+=(float value) { return *this = bfloat(float(*this) + value); }
};
typedef half float16_t;
typedef bfloat bfloat16_t;

struct alignas(8) uint2 {
  uint x, y;
  uint2() = default;
  uint2(uint a) : x(a), y(a) {}
  uint2(uint a, uint b) : x(a), y(b) {}
};
struct alignas(16) uint3 {
  uint x, y, z;
  uint3() = default;
  uint3(uint a, uint b, uint c) : x(a), y(b), z(c) {}
};
struct alignas(16) uint4 {
  uint x, y, z, w;
  uint4() = default;
  uint4(uint a) : x(a), y(a), z(a), w(a) {}
  uint4(uint a, uint b, uint c, uint d) : x(a), y(b), z(c), w(d) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
  float4() = default;
  float4(float a) : x(a), y(a), z(a), w(a) {}
  float4(float a, float b, float c, float d) : x(a), y(b), z(c), w(d) {}
};
template <class To, class From>
inline To as_type(const From& from) { return msl::bits<To>(from); }
inline uint popcount(uint word) { return uint(__builtin_popcount(word)); }
inline uint min(uint a, uint b) { return a < b ? a : b; }
inline uint max(uint a, uint b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
