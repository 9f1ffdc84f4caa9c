//! Strategies of products, from which the sizes choose.

use std::marker::PhantomData;

use ortrain_expr::DType;

use super::byte_tiles;
use super::levels::Real;
use super::micro::{Micro, TileProducts};
use super::operand::{MAX_REUSED_BLOCK_BYTES, Operand};
use super::packed_dots;
use super::small_m;
use crate::candidates::{Candidate, Table};
use crate::isa::Isa;

/// Maximum number of elements of results for split-K.
const MAX_SPLIT_K_ELEMENTS: usize = 128 * 128;
/// Maximum numbers of rows and of columns of a product computed by dot products.
const MAX_DOT_LINES: (usize, usize) = (16, 12);
/// Minimum depth for dot products with few rows; with few columns twice as much.
const MIN_DOT_DEPTH: usize = 64;
/// Maximum number of rows for which converting B anew for each row is faster than packing it.
const MAX_CONVERTED_ROWS: usize = 4;
/// Maximum depth of a chunk: a panel of A of this depth stays in the first-level cache while panels of B stream
/// through.
pub(super) const MAX_CHUNK_DEPTH: usize = 384;
/// Minimum depth of a part of split-K.
pub(super) const MIN_SPLIT_K_DEPTH: usize = 512;
/// Minimum ratio of the elements of B to the elements of A and of the results for a swapped product, in halves. The
/// first value applies if B then needs no packing, the second otherwise.
const MIN_SWAP_RATIO_HALVES: (usize, usize) = (3, 4);

/// Way to compute the blocks of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strategy {
    /// Dot products of few rows with columns of B in place, which are adjacent along k.
    DotsOfRows,
    /// Dot products of few columns with rows of A in place, which are adjacent along k.
    DotsOfColumns,
    /// Products of few rows, with B in place.
    FewRows,
    /// Panels of the swapped product `Cᵀ = Bᵀ·Aᵀ`. Finished blocks are transposed.
    SwappedPanels,
    /// Panels of both operands, packed or in place.
    Panels,
}

impl Strategy {
    /// Returns true if the product is computed as dot products.
    pub(super) fn is_dots(self) -> bool {
        matches!(self, Strategy::DotsOfRows | Strategy::DotsOfColumns)
    }

    /// Returns true if panels of both operands are multiplied.
    pub(super) fn is_panels(self) -> bool {
        matches!(self, Strategy::SwappedPanels | Strategy::Panels)
    }
}

/// Request for a strategy.
pub(super) struct Request<'a, T: 'static> {
    pub(super) batch: usize,
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) a: &'a Operand,
    pub(super) b: &'a Operand,
    pub(super) micro: Micro<T>,
    pub(super) isa: Isa,
}

impl<T: Real> Request<'_, T> {
    /// Returns true if the operands are multiplied unchanged, without packing. Tiles are always packed.
    fn multiplies_unchanged(&self) -> bool {
        self.micro.tiles.is_none()
    }

    /// Returns true if there are dot products of at least one term, and if the elements of a line of the operand are
    /// adjacent along k. A quantized operand is decoded first.
    fn has_dots_of(&self, operand: &Operand) -> bool {
        let is_decoded = operand.quantized.is_some() && operand.elements.rounded.is_none();
        (is_decoded || operand.is_stored_as(T::DTYPE))
            && operand.depth == 1
            && self.k > 0
            && self.multiplies_unchanged()
            && T::dots(self.isa).is_some()
    }

    /// Returns true if there are few long sums, so that k may be split.
    pub(super) fn may_split_k(&self) -> bool {
        self.batch * self.m * self.n <= MAX_SPLIT_K_ELEMENTS && self.k >= 2 * MIN_SPLIT_K_DEPTH
    }
}

/// Table of products.
pub(super) struct Products<T>(PhantomData<T>);

impl<T: 'static> Table for Products<T> {
    type Request<'a> = Request<'a, T>;
    type Kernel = Strategy;
}

/// All candidates, from the fastest to the most general one.
pub(super) fn candidates<T: Real>() -> [Candidate<Products<T>>; 9] {
    [
        Candidate {
            name: "product.few_packed_rows",
            accepts: |request| {
                let Request { m, k, a, b, .. } = *request;
                T::DTYPE == DType::F32
                    && (1..=packed_dots::MAX_ROWS).contains(&m)
                    && (k > 0 && k.is_multiple_of(packed_dots::LANES))
                    && (m * T::BYTES).saturating_mul(k) <= MAX_REUSED_BLOCK_BYTES
                    && a.quantized.is_none()
                    && b.is_packed_line_by_line()
                    && packed_dots::has_packed_dots(request.isa)
                    && request.multiplies_unchanged()
            },
            preferences: &[],
            build: |_| Some(Strategy::FewRows),
        },
        Candidate {
            name: "product.dots_of_rows",
            accepts: |request| request.has_dots_of(request.b),
            preferences: &[suits_dots_of_rows],
            build: |_| Some(Strategy::DotsOfRows),
        },
        Candidate {
            name: "product.dots_of_columns",
            accepts: |request| request.has_dots_of(request.a),
            preferences: &[suits_dots_of_columns],
            build: |_| Some(Strategy::DotsOfColumns),
        },
        Candidate {
            name: "product.few_rows",
            accepts: |request| {
                let Request { m, k, b, .. } = *request;
                let is_plain = request.a.quantized.is_none() && b.quantized.is_none();
                let fits = is_plain && (m * T::BYTES).saturating_mul(k) <= MAX_REUSED_BLOCK_BYTES;
                request.multiplies_unchanged() && (b.line == 1 || b.depth == 1) && fits
            },
            preferences: &[has_small_m],
            build: |_| Some(Strategy::FewRows),
        },
        Candidate {
            name: "product.swapped_panels",
            accepts: |request| {
                let plain = request.b.is_stored_as(T::DTYPE);
                let adjacent = request.b.depth == 1 || request.b.line == 1;
                request.multiplies_unchanged() && plain && adjacent && !request.may_split_k()
            },
            preferences: &[fills_swapped_panels, has_large_b],
            build: |_| Some(Strategy::SwappedPanels),
        },
        Candidate {
            name: "product.bf16_tiles",
            accepts: |request| matches!(request.micro.tiles, Some(TileProducts::Bf16(_))),
            preferences: &[],
            build: |_| Some(Strategy::Panels),
        },
        Candidate {
            name: "product.few_byte_rows",
            accepts: |request| match request.micro.tiles {
                Some(TileProducts::Bytes(bytes)) => {
                    (1..=byte_tiles::MAX_ROWS).contains(&request.m)
                        && request.k > 0
                        && request.b.line == 1
                        && bytes.multiplies_small_m()
                }
                _ => false,
            },
            preferences: &[reads_wide_b_once],
            build: |_| Some(Strategy::FewRows),
        },
        Candidate {
            name: "product.byte_tiles",
            accepts: |request| matches!(request.micro.tiles, Some(TileProducts::Bytes(_))),
            preferences: &[],
            build: |_| Some(Strategy::Panels),
        },
        Candidate {
            name: "product.panels",
            accepts: |request| request.multiplies_unchanged(),
            preferences: &[],
            build: |_| Some(Strategy::Panels),
        },
    ]
}

/// All rows must stay in the first-level cache. In short sums, joining the lanes costs more than the products.
fn suits_dots_of_rows<T>(request: &Request<'_, T>) -> bool {
    request.m <= MAX_DOT_LINES.0 && request.k >= MIN_DOT_DEPTH
}

/// All columns must stay in the first-level cache. In short sums, joining the lanes costs more than the products.
fn suits_dots_of_columns<T>(request: &Request<'_, T>) -> bool {
    request.n <= MAX_DOT_LINES.1 && request.k >= 2 * MIN_DOT_DEPTH
}

/// Packing B costs more than multiplying one row, or some rows if B must be converted. Panels add longer sums in
/// chunks, which would change the order of the additions.
fn has_small_m<T: Real>(request: &Request<'_, T>) -> bool {
    let max_rows = match request.b.line == 1 && request.k <= MAX_CHUNK_DEPTH {
        true if request.b.is_stored_as(T::DTYPE) => 1,
        true => MAX_CONVERTED_ROWS,
        false => small_m::MAX_ROWS,
    };
    request.m <= max_rows
}

/// Each block of columns of B must fill vectors. With more than very few rows, packing B for all matrices of a batch is
/// faster than interleaving it for each matrix.
fn reads_wide_b_once<T>(request: &Request<'_, T>) -> bool {
    let Request { batch, m, n, b, .. } = request;
    *n >= byte_tiles::MIN_COLUMNS && (*m <= MAX_CONVERTED_ROWS || *batch == 1 || !b.batch.is_constant())
}

/// Rows of A become columns of panels. Panels that are not full waste lanes.
fn fills_swapped_panels<T: Real>(request: &Request<'_, T>) -> bool {
    request.micro.fills_panels(request.m)
}

/// Only one task reads or packs each part of the operand that becomes A. This pays if B is larger than the other
/// tensors.
fn has_large_b<T: Real>(request: &Request<'_, T>) -> bool {
    let Request { m, n, k, b, .. } = *request;
    let halves =
        if b.is_adjacent_along_k(T::DTYPE) { MIN_SWAP_RATIO_HALVES.0 } else { MIN_SWAP_RATIO_HALVES.1 };
    2usize.saturating_mul(n).saturating_mul(k) >= halves.saturating_mul(m).saturating_mul(k.saturating_add(n))
}
