//! Operations of tile programs, and their registers.

use ortrain_expr::{BinaryOp, CompareOp, ReduceOp, RunScalar, Type, UnaryOp};

/// A register. Before allocation: the index of the register. After allocation: the byte offset in a worker's frame.
/// Operands that are read directly from callers' memory ([`RegisterKind::Direct`],
/// [`RegisterKind::DirectUniform`]) have the bit [`DIRECT_BIT`] set, and the index of the load instead.
pub(super) type Slot = u32;

/// Bit of a [`Slot`] that is read directly from callers' memory.
pub(super) const DIRECT_BIT: Slot = 1 << 31;

/// The completed block of a matrix product, read directly.
pub(super) const DIRECT_PRODUCT: Slot = Slot::MAX;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(super) kind: Kind,
    /// True if the operation computes one value, not one for each index of the tile.
    pub(super) is_uniform: bool,
    pub(super) d: Slot,
    pub(super) a: [Slot; 3],
    /// For an operation that computes a value for each index: the operands that are one value for the whole tile.
    pub(super) uniform_operands: [bool; 3],
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Const(u64),
    Run(RunScalar),
    /// `(linear / after) % dim`, of the linear index along the tile (`along`) or outside of the tile.
    Coordinate {
        along: bool,
        after: usize,
        dim: usize,
    },
    Load(u16),
    /// Copies an operand from callers' memory into a register.
    Copy(Type),
    LoadAt(u16),
    /// Loads consecutive elements from an index on that is the same for the whole row.
    LoadRow(u16),
    Unary(UnaryOp, Type),
    Binary(BinaryOp, Type),
    Compare(CompareOp, Type),
    /// Compares a coordinate along the tile with one number. `first`: the coordinate is the first operand.
    CompareCoordinate {
        op: CompareOp,
        first: bool,
        after: usize,
        dim: usize,
    },
    Select(Type),
    Convert(Type, Type),
    /// Bounds check, with the index of its instruction.
    Guard(u16),
    Random,
    Splat(Type),
    Store(u16),
    /// Reduces a tile and adds the result to a [`PairwiseSum`].
    Fold(ReduceOp, Type),
    /// Combines a tile with another tile, element by element.
    Accumulate(ReduceOp, Type),
    /// Several operations as one function of machine code, with the index of the function.
    Native(u16),
}

impl Kind {
    /// Returns the number of registers that the operation reads.
    pub(super) fn operands(self) -> usize {
        match self {
            Kind::Const(_) | Kind::Run(_) | Kind::Coordinate { .. } | Kind::Load(_) | Kind::Native(_) => 0,
            Kind::Copy(_)
            | Kind::LoadAt(_)
            | Kind::LoadRow(_)
            | Kind::CompareCoordinate { .. }
            | Kind::Unary(..)
            | Kind::Convert(..)
            | Kind::Splat(_)
            | Kind::Store(_)
            | Kind::Fold(..)
            | Kind::Accumulate(..) => 1,
            Kind::Binary(..) | Kind::Compare(..) | Kind::Guard(_) => 2,
            Kind::Select(_) | Kind::Random => 3,
        }
    }

    /// Returns true if the operation defines its result register.
    pub(super) fn has_result(self) -> bool {
        !matches!(self, Kind::Store(_) | Kind::Fold(..) | Kind::Accumulate(..))
    }

    /// Estimates the work per element, in additions.
    pub(super) fn cost(self) -> usize {
        match self {
            Kind::Unary(
                UnaryOp::Exp
                | UnaryOp::Log
                | UnaryOp::Erf
                | UnaryOp::Tanh
                | UnaryOp::Sigmoid
                | UnaryOp::Sqrt
                | UnaryOp::Rsqrt
                | UnaryOp::Sin
                | UnaryOp::Cos
                | UnaryOp::Atan,
                ty,
            ) => {
                if ty == Type::F32 {
                    8
                } else {
                    64
                }
            }
            Kind::Binary(BinaryOp::Pow | BinaryOp::Rem, _) => 32,
            Kind::Random => 16,
            Kind::Unary(UnaryOp::ToF16 | UnaryOp::ToBf16, _)
            | Kind::Binary(BinaryOp::Div, _)
            | Kind::LoadAt(_)
            | Kind::Guard(_) => 4,
            _ => 1,
        }
    }
}

/// Storage of a register.
#[derive(Clone, Copy)]
pub(super) enum RegisterKind {
    /// One value.
    Uniform,
    /// A value per index of a tile.
    Tile(Type),
    /// A [`PairwiseSum`].
    PairwiseSum,
    /// 16 partial results of a fold.
    Lanes,
    /// No bytes: contiguous elements are read directly at this slot.
    Direct(Slot),
    /// No bytes: one value is read directly at this slot.
    DirectUniform(Slot),
}
