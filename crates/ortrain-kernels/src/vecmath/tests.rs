//! Checks the stated error bounds against `libm` in doubles. With `ORTRAIN_ALL_F32=1` every f32 is tested
//! (`make conform`; only in release builds, in some minutes). Otherwise the tests use one f32 in a thousand, and more
//! where the functions bend.

use super::*;
use crate::isa::{Isa, Work};

/// Returns the distance in representable numbers; two NaN are equal.
fn ulp(a: f32, b: f32) -> u32 {
    if a.is_nan() && b.is_nan() {
        return 0;
    }
    if a.is_nan() != b.is_nan() {
        return u32::MAX;
    }
    let order = |v: f32| {
        let bits = v.to_bits() as i32;
        i64::from(if bits < 0 { i32::MIN.wrapping_sub(bits) } else { bits })
    };
    u32::try_from((order(a) - order(b)).unsigned_abs()).unwrap_or(u32::MAX)
}

/// Runs a function over a slice, at a level.
type Run = fn(Isa, &[f32], &mut [f32]);

macro_rules! run {
    (|$x:ident| $call:expr) => {{
        struct Each<'a>(&'a [f32], &'a mut [f32]);
        impl Work for Each<'_> {
            type Out = ();
            #[inline(always)]
            fn work<L: Level>(self) {
                for (y, &$x) in self.1.iter_mut().zip(self.0) {
                    *y = $call;
                }
            }
        }
        let run: Run = |isa, x, y| isa.run(Each(x, y));
        run
    }};
}

struct Function {
    name: &'static str,
    bound: u32,
    exact: fn(f64) -> f64,
    run: Run,
}

fn functions() -> [Function; 9] {
    let function = |name, bound, exact, run| Function { name, bound, exact, run };
    [
        function("exp", EXP_MAX_ULP, libm::exp, run!(|x| exp::<L>(x))),
        function("log", LOG_MAX_ULP, libm::log, run!(|x| log::<L>(x))),
        function("tanh", TANH_MAX_ULP, libm::tanh, run!(|x| tanh::<L>(x))),
        function("sigmoid", SIGMOID_MAX_ULP, |x| 1.0 / (1.0 + libm::exp(-x)), run!(|x| sigmoid::<L>(x))),
        function("erf", ERF_MAX_ULP, libm::erf, run!(|x| erf::<L>(x))),
        function("rsqrt", RSQRT_MAX_ULP, |x| 1.0 / x.sqrt(), run!(|x| rsqrt(x))),
        function(
            "sin",
            SIN_MAX_ULP,
            libm::sin,
            run!(|x| if is_large_angle(x) { sin_large(x) } else { sin::<L>(x) }),
        ),
        function(
            "cos",
            COS_MAX_ULP,
            libm::cos,
            run!(|x| if is_large_angle(x) { cos_large(x) } else { cos::<L>(x) }),
        ),
        function("atan", ATAN_MAX_ULP, libm::atan, run!(|x| atan::<L>(x))),
    ]
}

/// Returns the largest error at each level, and its argument.
fn max_errors(function: &Function, levels: &[Isa], x: &[f32]) -> Vec<(u32, f32)> {
    let exact: Vec<f32> = x.iter().map(|&x| (function.exact)(f64::from(x)) as f32).collect();
    let mut y = vec![0.0; x.len()];
    let mut level_errors = Vec::new();
    for &isa in levels {
        (function.run)(isa, x, &mut y);
        let errors = y.iter().zip(&exact).zip(x).map(|((&y, &exact), &x)| (ulp(y, exact), x));
        level_errors.push(errors.max_by_key(|error| error.0).unwrap_or((0, 0.0)));
    }
    level_errors
}

fn sample_arguments() -> Vec<f32> {
    let mut values: Vec<f32> = (0..u32::MAX).step_by(1021).map(f32::from_bits).collect();
    // Dense samples where the functions bend.
    values.extend((0..2_000_000).map(|i| (i as f32 - 1_000_000.0) * 1.1e-4));
    values.extend((0..200_000).map(|i| (i as f32 - 100_000.0) * 4e-5));
    // Multiples of a quarter of a circle, small and large.
    values.extend((0..200_000).map(|i| (f64::from(i) * 37.0 * std::f64::consts::FRAC_PI_2) as f32));
    let edges = [
        0.0f32,
        1.0,
        0.5,
        0.625,
        0.925,
        0.414_213_57,
        2.414_213_7,
        3.95,
        88.722_83,
        89.0,
        103.97,
        104.0,
        1e-45,
        1.2e-38,
        3.4e38,
        MIN_LARGE_ANGLE,
    ];
    for edge in edges {
        for delta in -3i32..=3 {
            let neighbor = f32::from_bits((edge.to_bits() as i32 + delta).max(0) as u32);
            values.extend([neighbor, -neighbor]);
        }
    }
    values.extend([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, f32::MAX, f32::MIN]);
    values
}

#[test]
fn errors_are_within_the_stated_bounds() {
    let levels = Isa::available();
    let is_exhaustive = std::env::var("ORTRAIN_ALL_F32").is_ok_and(|value| value == "1");
    let some = sample_arguments();
    for function in functions() {
        let all_errors = if is_exhaustive {
            max_errors_over_all_f32(&function, &levels)
        } else {
            max_errors(&function, &levels, &some)
        };
        let Function { name, bound, .. } = function;
        for (isa, (error, x)) in levels.iter().zip(&all_errors) {
            assert!(*error <= bound, "{isa}: {name}({x:e}) is {error} ULP off");
        }
        // The bounds are tight: some level reaches them.
        assert!(all_errors.iter().any(|measured| measured.0 == bound), "{name}: {all_errors:?}");
    }
}

/// Checks every f32; the cores share the work.
#[allow(clippy::print_stderr, reason = "what came out is of interest")]
fn max_errors_over_all_f32(function: &Function, levels: &[Isa]) -> Vec<(u32, f32)> {
    const CHUNK: u32 = 1 << 20;
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u32;
    let of_core = |core: u32| {
        let mut maxima = vec![(0, 0.0); levels.len()];
        for chunk in (core..=u32::MAX / CHUNK).step_by(cores as usize) {
            let x: Vec<f32> = (0..CHUNK).map(|i| f32::from_bits(chunk * CHUNK + i)).collect();
            for (maximum, found) in maxima.iter_mut().zip(max_errors(function, levels, &x)) {
                *maximum = if found.0 > maximum.0 { found } else { *maximum };
            }
        }
        maxima
    };
    let maxima = std::thread::scope(|scope| {
        let of_core = &of_core;
        let threads: Vec<_> = (0..cores).map(|core| scope.spawn(move || of_core(core))).collect();
        let thread_errors = threads.into_iter().map(|thread| thread.join().expect("no panics"));
        let join = |a: Vec<(u32, f32)>, b: Vec<(u32, f32)>| {
            a.into_iter().zip(b).map(|(a, b)| if b.0 > a.0 { b } else { a }).collect()
        };
        thread_errors.reduce(join).expect("at least one core")
    });
    for (isa, (error, x)) in levels.iter().zip(&maxima) {
        eprintln!("{} at {isa}: {error} ULP over all f32, first at {x:e}", function.name);
    }
    maxima
}

#[test]
fn zeros_keep_their_sign() {
    for function in functions().iter().filter(|function| ["tanh", "erf", "sin"].contains(&function.name)) {
        for isa in Isa::available() {
            let x = [0.0f32, -0.0];
            let mut y = [1.0f32; 2];
            (function.run)(isa, &x, &mut y);
            assert_eq!(y.map(f32::to_bits), x.map(f32::to_bits), "{} at {isa}", function.name);
        }
    }
}

#[test]
fn pow_is_within_its_bound() {
    let mut bases: Vec<f32> = (0..u32::MAX).step_by(15_000_017).map(f32::from_bits).collect();
    bases.extend((0..400).map(|i| 0.9 + i as f32 * 5e-4));
    let mut exponents: Vec<f32> = (0..u32::MAX).step_by(25_000_009).map(f32::from_bits).collect();
    exponents.extend((0..160).map(|i| (i as f32 - 80.0) * 0.5));
    exponents.extend([16_777_215.0, -16_777_215.0, 16_777_216.0, 8_388_607.5, 100_001.0, 1e6]);
    for list in [&mut bases, &mut exponents] {
        list.extend([
            0.0,
            -0.0,
            1.0,
            -1.0,
            2.0,
            -2.0,
            3.0,
            -3.0,
            0.5,
            -0.5,
            1e-45,
            -1e-45,
            f32::MAX,
            f32::MIN,
        ]);
        list.extend([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE]);
    }
    struct Run<'a>(&'a [f32], f32, &'a mut [f32]);
    impl Work for Run<'_> {
        type Out = ();
        #[inline(always)]
        fn work<L: Level>(self) {
            for (z, &x) in self.2.iter_mut().zip(self.0) {
                *z = pow::<L>(x, self.1);
            }
        }
    }
    let mut results = vec![0.0; bases.len()];
    for isa in Isa::available() {
        for &y in &exponents {
            isa.run(Run(&bases, y, &mut results));
            for (&x, &z) in bases.iter().zip(&results) {
                let exact = libm::pow(f64::from(x), f64::from(y)) as f32;
                let error = ulp(z, exact);
                assert!(error <= POW_MAX_ULP, "{isa}: pow({x:e}, {y:e}) = {z:e}, not {exact:e}");
                assert!(
                    z != 0.0 || z.is_sign_negative() == exact.is_sign_negative(),
                    "{isa}: the sign of pow({x:e}, {y:e})"
                );
            }
        }
    }
}
