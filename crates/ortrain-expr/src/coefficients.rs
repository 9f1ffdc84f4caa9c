//! Coefficients of the elementary functions, shared by evaluators and code generators.
//!
//! Polynomials are near-minimax (Chebyshev) fits, computed for this file. The vector code of the CPU and the kernels
//! generated for GPUs share these tables.
#![allow(clippy::excessive_precision, reason = "coefficients are written as they were fitted")]

/// Coefficients of `exp` for r² and higher powers, the highest power first.
pub const EXP: [f32; 5] = [1.392_692_7e-3, 8.363_774e-3, 4.166_655e-2, 1.666_657_3e-1, 0.5];
/// Coefficients of `log`, in even powers of s.
pub const LOG: [f32; 4] = [2.333_681e-1, 2.855_058_7e-1, 4.000_012_4e-1, 6.666_666_7e-1];
/// Bits of sqrt(1/2), the smallest mantissa of `log`: mantissas are normalized to [sqrt(1/2), sqrt(2)).
pub const SQRT_HALF_BITS: u32 = 0x3f35_04f3;
/// Coefficients of `tanh` for magnitudes below [`TANH_POLYNOMIAL_LIMIT`], in even powers.
pub const TANH: [f32; 5] = [-6.096_714_2e-3, 2.099_717_9e-2, -5.385_091e-2, 1.333_277e-1, -3.333_332_9e-1];
/// Magnitude from which `tanh` is computed by an exponential.
pub const TANH_POLYNOMIAL_LIMIT: f32 = 0.625;
/// Coefficients of `erf` for magnitudes below [`ERF_POLYNOMIAL_LIMIT`], in even powers.
pub const ERF: [f32; 7] = [
    8.334_719e-5,
    -8.134_709e-4,
    5.200_368_6e-3,
    -2.685_915_1e-2,
    1.128_369_15e-1,
    -3.761_263_4e-1,
    1.283_791_7e-1,
];
/// Magnitude from which `erf` is computed by an exponential.
pub const ERF_POLYNOMIAL_LIMIT: f32 = 0.925;
/// Coefficients of `(erf - 1) exp(x²)` for magnitudes from [`ERF_POLYNOMIAL_LIMIT`] on, in powers of `x - 1`.
pub const ERF_LARGE: [f32; 9] = [
    -1.270_821_8e-4,
    1.192_314e-3,
    -5.266_233_3e-3,
    1.557_830_4e-2,
    -3.720_463_4e-2,
    7.917_458e-2,
    -1.543_715e-1,
    2.732_123_7e-1,
    -4.275_835_8e-1,
];
/// Magnitude from which `erf` rounds to 1.
pub const ERF_SATURATION: f32 = 3.95;

/// First part of ln 2, with few bits: its product with a small integer is exact.
pub const LN2_HIGH: f32 = 0.693_359_375;
/// Remainder of ln 2 after [`LN2_HIGH`].
pub const LN2_LOW: f32 = -2.121_944_4e-4;

/// Lower clamp of the argument of `exp`. There, both halves of the power of two by which `exp` multiplies are zero. Far
/// below zero, for example at masked scores, no product underflows, which would be slow.
pub const EXP_MIN_ARGUMENT: f32 = -176.0;

/// Coefficients of `sin(x) / x - 1` for magnitudes up to pi/4: x² and higher even powers, the highest first.
pub const SINE: [f64; 4] = [
    2.718_114_111_568_747e-6,
    -1.983_931_148_464_872_7e-4,
    8.333_329_302_414_387e-3,
    -1.666_666_664_077_620_7e-1,
];
/// Coefficients of `cos(x) - 1` for magnitudes up to pi/4: x² and higher even powers, the highest first.
pub const COSINE: [f64; 5] = [
    -2.717_471_265_830_653e-7,
    2.479_895_966_977_013_3e-5,
    -1.388_888_065_440_962e-3,
    4.166_666_655_333_496_6e-2,
    -4.999_999_999_948_886e-1,
];
/// Coefficients of `atan(x) / x - 1` for magnitudes up to tan(pi/8): x² and higher even powers, the highest first.
pub const ATAN: [f64; 6] = [
    5.054_207_699_816_242e-2,
    -8.627_288_731_533_561e-2,
    1.107_175_904_842_622e-1,
    -1.428_417_548_716_476e-1,
    1.999_997_778_424_976_2e-1,
    -3.333_333_328_108_230_6e-1,
];
/// Coefficients of `log2((1 + s) / (1 - s)) / s`, in even powers of s, the highest first.
pub const LOG2: [f64; 6] = [
    2.830_044_311_712_459e-1,
    3.198_988_788_311_698e-1,
    4.122_094_058_466_899e-1,
    5.770_779_409_853_41e-1,
    9.617_966_941_175_542e-1,
    2.885_390_081_777_848_2,
];
/// Coefficients of `(2^x - 1) / x` for magnitudes up to 1/2, the highest power first.
pub const EXP2: [f64; 7] = [
    1.529_750_254_363_543_8e-5,
    1.546_167_697_597_332_5e-4,
    1.333_350_193_834_123_7e-3,
    9.618_056_096_717_177e-3,
    5.550_410_884_119_931_5e-2,
    2.402_265_092_502_106_4e-1,
    std::f64::consts::LN_2,
];
