//! Engine: one way to compute a pooling, and the request that selects it.

use std::fmt;

use ortrain_expr::{WindowPass, WindowShape};

use crate::candidates::{Candidate, Table};
use crate::isa::Isa;
use crate::window::plan::{Buffers, Part, Plan, Tasks};

/// Request for an engine.
pub(super) struct Request<'a> {
    pub(super) plan: &'a Plan,
    pub(super) shape: &'a WindowShape,
}

impl Request<'_> {
    /// Returns true for a maximum or a sum, which are no gradients.
    pub(super) fn is_forward(&self) -> bool {
        matches!(self.plan.pass, WindowPass::Max | WindowPass::Sum)
    }
}

/// An engine with the division of its work.
#[derive(Debug)]
pub(super) struct Selected {
    pub(super) engine: Box<dyn Engine>,
    pub(super) tasks: Tasks,
    /// Bytes of scratch memory of a worker.
    pub(super) scratch: usize,
}

/// Table of poolings.
pub(super) struct Poolings;

impl Table for Poolings {
    type Request<'a> = Request<'a>;
    type Kernel = Selected;
}

/// Candidate of the table of poolings.
pub(super) type WindowCandidate = Candidate<Poolings>;

/// An algorithm for pooling.
pub(super) trait Engine: fmt::Debug + Send + Sync {
    /// Returns the number of rows of a plane, which parts of planes consist of.
    fn rows(&self, plan: &Plan) -> usize {
        plan.target_rows()
    }

    /// Computes a part of the target. Requires the contract of [`super::WindowKernel::run`], and that no other task uses
    /// the part.
    fn compute_part(&self, plan: &Plan, isa: Isa, buffers: Buffers, part: Part);
}

/// Evaluates an expression with `$s` as the [`Element`] of a listed type.
macro_rules! with_one_of {
    ($dtype:expr, $s:ident => $e:expr, [$($variant:ident: $t:ty),*], $other:ident => $fault:expr) => {
        match $dtype {
            $(ortrain_expr::DType::$variant => {
                type $s = $t;
                $e
            })*
            $other => $fault,
        }
    };
}

/// Evaluates an expression with `$s` as the [`Element`] of any type that is pooled.
macro_rules! with_element {
    ($dtype:expr, $s:ident => $e:expr) => {
        $crate::window::engine::with_one_of!(
            $dtype,
            $s => $e,
            [
                F32: f32, F64: f64, F16: crate::tile::number::F16, BF16: crate::tile::number::Bf16,
                I8: i8, I16: i16, I32: i32, I64: i64, U8: u8, U16: u16, U32: u32, U64: u64
            ],
            other => unreachable!("pooling of {other}: rejected at compile time")
        )
    };
}

/// Evaluates an expression with `$s` as the [`Element`] of a float type, for algorithms that only support floats.
macro_rules! with_float {
    ($dtype:expr, $s:ident => $e:expr) => {
        $crate::window::engine::with_one_of!(
            $dtype,
            $s => $e,
            [F32: f32, F64: f64, F16: crate::tile::number::F16, BF16: crate::tile::number::Bf16],
            other => unreachable!("{other}: this path is only for floats")
        )
    };
}

/// Runs `Run` of this module over a part of a maximum or a sum, with the constants of its pass.
macro_rules! run_forward {
    ($layout:expr, $plan:expr, $isa:expr, $buffers:expr, $part:expr) => {
        $crate::window::engine::with_float!($plan.dtype, S => match ($plan.pass, $plan.positions.are_needed()) {
            (WindowPass::Max, true) => {
                $isa.run(Run::<S, true, true>::new($plan, $layout, $buffers, $part))
            }
            (WindowPass::Max, false) => {
                $isa.run(Run::<S, true, false>::new($plan, $layout, $buffers, $part))
            }
            _ => $isa.run(Run::<S, false, false>::new($plan, $layout, $buffers, $part)),
        })
    };
}

pub(super) use {run_forward, with_element, with_float, with_one_of};
