// The phases of a strided dgrad: pixels of dx by their residues modulo the stride. Host and device, without CUDA headers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "common/activation.h"  // JAXCONV_HD
#include "common/problem.h"

namespace jaxconv::cuda {

// One axis of a dgrad. Input pixel h meets output o through tap r where h + pad = o*stride +
// r*dilation, so the pixels of one residue h % stride share their taps: r = first + j * stride/g, g
// = gcd(stride, dilation), which exist only if g divides (h + pad). For h = residue + stride * h',
// o = h' + origin - j * dilation/g : a stride-1 convolution.
struct DgradAxis {
  int extent;  // H
  int taps;    // R
  int stride, pad, dilation;
  int gcd;       // g
  int inverse;   // of dilation/g modulo stride/g; 0 if stride/g is 1
  int residues;  // min(stride, H): phases on this axis
};

struct DgradPhase {
  int rows;    // pixels of this residue
  int taps;    // taps that reach it; may be 0
  int first;   // the first of them
  int origin;  // o = h' + origin - j * dilation/g
};

JAXCONV_HD DgradPhase MakeDgradPhase(const DgradAxis& a, int residue) {
  DgradPhase phase;
  phase.rows = (a.extent - residue + a.stride - 1) / a.stride;
  const int every = a.stride / a.gcd;
  int rest = (residue + a.pad) % a.stride;
  if (rest < 0) rest += a.stride;
  phase.first = int(int64_t(rest / a.gcd) * a.inverse % every);
  phase.taps =
      rest % a.gcd == 0 && phase.first < a.taps ? (a.taps - 1 - phase.first) / every + 1 : 0;
  // The division is exact where there are taps.
  phase.origin = phase.taps == 0 ? 0 : (residue + a.pad - phase.first * a.dilation) / a.stride;
  return phase;
}

// The inverse of a modulo n, both positive and coprime; 0 if n is 1.
inline int64_t InverseModulo(int64_t a, int64_t n) {
  int64_t r0 = n, r1 = a % n, t0 = 0, t1 = 1;
  while (r1 != 0) {
    const int64_t q = r0 / r1;
    std::swap(r0 -= q * r1, r1);
    std::swap(t0 -= q * t1, t1);
  }
  return ((t0 % n) + n) % n;
}

// Axis d (D H W) of the dgrad of p.
inline DgradAxis MakeDgradAxis(const ConvProblem& p, int d) {
  DgradAxis a;
  a.extent = int(p.in[d]);
  a.taps = int(p.filter[d]);
  a.stride = int(p.stride[d]);
  a.pad = int(p.pad[d]);
  a.dilation = int(p.dilation[d]);
  a.gcd = int(std::gcd(p.stride[d], p.dilation[d]));
  a.inverse = int(InverseModulo(a.dilation / a.gcd, a.stride / a.gcd));
  a.residues = std::min(a.stride, a.extent);
  return a;
}

}  // namespace jaxconv::cuda
