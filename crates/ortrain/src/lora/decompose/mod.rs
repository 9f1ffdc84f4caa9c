//! Decompositions of a weight in float64: its largest singular values, and its QR factorization.
//!
//! The methods are our own: a crate of linear algebra would add more to the library than these files, and a singular
//! value decomposition of all values takes minutes for a large weight, of which an adapter needs a small part.

mod jacobi;
mod krylov;
mod matrix;
mod qr;

pub(super) use matrix::Matrix;
pub(super) use qr::{LeadingQr, leading_qr};

/// Largest number of rows or columns, whichever are fewer, for which all singular values are computed.
const MAX_DIRECT: usize = 64;

/// Singular values of a matrix, largest first, with their vectors as rows.
pub(super) struct Singular {
    /// Values.
    pub(super) values: Vec<f64>,
    /// Left vectors: a matrix `[values, rows]`.
    pub(super) left: Matrix,
    /// Right vectors: a matrix `[values, columns]`.
    pub(super) right: Matrix,
}

impl Singular {
    /// Returns the first values.
    fn truncated(self, rank: usize) -> Singular {
        let first = |matrix: Matrix| {
            let Matrix { rows, columns, mut elements } = matrix;
            let rows = rows.min(rank);
            elements.truncate(rows * columns);
            Matrix { rows, columns, elements }
        };
        let mut values = self.values;
        values.truncate(rank);
        Singular { values, left: first(self.left), right: first(self.right) }
    }
}

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
