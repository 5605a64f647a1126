// The arrays of a call, each by its role. Arrays<in::X, in::Mean, out::Y> has the members x, mean and y:
//
//   BatchNormInferArrays a(in::X(x), in::Mean(mean), ...);   // in any order; what is not named is null
//   kernel(a.x, a.mean);                                     // pointers to const void, of a result to void
//
// A role is a type: a mean that is given as a rstd does not compile.
#pragma once

#include <string_view>
#include <type_traits>

namespace jaxconv {

template <typename Role, typename Void>
class Pointer {
 public:
  Pointer() = default;
  explicit Pointer(Void* data) : data_(data) {}
  template <typename Other, typename Data>
  Pointer(Pointer<Other, Data>) = delete;  // an array of another role

  operator Void*() const { return data_; }
  template <typename T>
  auto as() const {
    return static_cast<std::conditional_t<std::is_const_v<Void>, const T, T>*>(data_);
  }

 private:
  Void* data_ = nullptr;
};

#define JAXCONV_ROLE_OF(Name, name, is_result, Void)        \
  struct Name {                                             \
    static constexpr std::string_view kName = #name;        \
    static constexpr bool kResult = is_result;              \
    Name() = default;                                       \
    explicit Name(Void* data) : name(data) {}               \
    explicit Name(Pointer<Name, Void> data) : name(data) {} \
    Pointer<Name, Void> name;                               \
  }
#define JAXCONV_ROLE(Name, name)                  \
  namespace in {                                  \
  JAXCONV_ROLE_OF(Name, name, false, const void); \
  }                                               \
  namespace out {                                 \
  JAXCONV_ROLE_OF(Name, name, true, void);        \
  }

// Names on the wire's errors, too. d<name>: the gradient of <name>.
JAXCONV_ROLE(X, x)
JAXCONV_ROLE(W, w)
JAXCONV_ROLE(X2, x2)              // of a second convolution, whose sums are added
JAXCONV_ROLE(B, b)                // a convolution's or dense layer's bias
JAXCONV_ROLE(C, c)                // what is added to the products
JAXCONV_ROLE(Residual, residual)  // what is added in front of the activation
JAXCONV_ROLE(ResidualScale, residual_scale)
JAXCONV_ROLE(OutScale, out_scale)
JAXCONV_ROLE(Y, y)
JAXCONV_ROLE(Z, z)        // y before the activation
JAXCONV_ROLE(Kept, kept)  // what the derivative of an activation is computed from
JAXCONV_ROLE(Dx, dx)
JAXCONV_ROLE(Dw, dw)
JAXCONV_ROLE(Db, db)
JAXCONV_ROLE(Dy, dy)
JAXCONV_ROLE(Dz, dz)
JAXCONV_ROLE(Dresidual, dresidual)
JAXCONV_ROLE(Signs, signs)        // of each element a bit, whether it is above 0
JAXCONV_ROLE(Position, position)  // of each maximum, its place in the window
// A norm's
JAXCONV_ROLE(Scale, scale)
JAXCONV_ROLE(Bias, bias)
JAXCONV_ROLE(Mean, mean)
JAXCONV_ROLE(Var, var)
JAXCONV_ROLE(Rstd, rstd)  // 1 / sqrt(var + epsilon)
JAXCONV_ROLE(RunningMean, running_mean)
JAXCONV_ROLE(RunningVar, running_var)
JAXCONV_ROLE(NewMean, new_mean)
JAXCONV_ROLE(NewVar, new_var)
JAXCONV_ROLE(K, k)          // what is near the mean
JAXCONV_ROLE(Shift, shift)  // mean - k
JAXCONV_ROLE(Dscale, dscale)
JAXCONV_ROLE(Dbias, dbias)
// A second batch-norm's, of r, which is added to the first
JAXCONV_ROLE(R, r)
JAXCONV_ROLE(ScaleR, scale_r)
JAXCONV_ROLE(BiasR, bias_r)
JAXCONV_ROLE(MeanR, mean_r)
JAXCONV_ROLE(RstdR, rstd_r)
JAXCONV_ROLE(DscaleR, dscale_r)
JAXCONV_ROLE(Dr, dr)
// Squeeze-and-excitation's two layers
JAXCONV_ROLE(W1, w1)
JAXCONV_ROLE(B1, b1)
JAXCONV_ROLE(W2, w2)
JAXCONV_ROLE(B2, b2)
JAXCONV_ROLE(Z1, z1)
JAXCONV_ROLE(Dz1, dz1)
JAXCONV_ROLE(Dz2, dz2)
JAXCONV_ROLE(Gate, gate)

#undef JAXCONV_ROLE
#undef JAXCONV_ROLE_OF

template <typename... Roles>
struct Arrays : Roles... {
  Arrays() = default;
  template <typename... Given>
  explicit Arrays(const Given&... given) {
    ((static_cast<Given&>(*this) = given), ...);
  }
};

static_assert(std::is_constructible_v<in::Mean, Pointer<in::Mean, const void>>);
static_assert(!std::is_constructible_v<in::Mean, Pointer<in::Rstd, const void>>);
static_assert(!std::is_assignable_v<decltype(in::Mean::mean)&, decltype(in::Rstd::rstd)>);

}  // namespace jaxconv
