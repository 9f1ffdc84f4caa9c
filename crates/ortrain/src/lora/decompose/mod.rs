//! Decompositions of a weight in float64: the largest singular values, and the QR factorization.
//!
//! The methods are our own, because crates of linear algebra compute all singular values. This takes minutes for a large
//! weight, and an adapter needs the first ones.

mod jacobi;
mod krylov;
mod matrix;
mod qr;

pub(super) use matrix::{Matrix, Singular};
pub(super) use qr::{LeadingQr, leading_qr};

/// Limit of the smaller size of a matrix up to which all singular values are computed.
const MAX_DIRECT: usize = 64;

/// Returns the largest `rank` singular values of a matrix. The same matrix gives the same bits on every machine.
pub(super) fn leading_singular(matrix: &Matrix, rank: usize) -> Singular {
    if matrix.rows.min(matrix.columns) > MAX_DIRECT {
        return krylov::leading_singular(matrix, rank);
    }
    if matrix.rows <= matrix.columns {
        return jacobi::singular(matrix.clone()).truncated(rank);
    }
    let Singular { values, left, right } = jacobi::singular(matrix.transposed()).truncated(rank);
    Singular { values, left: right, right: left }
}
