//! Singular values by the one-sided method of Jacobi: rotations of pairs of rows until all rows are orthogonal.
//!
//! (G. Golub and C. Van Loan, "Matrix Computations", section 8.6.3.)

use super::matrix::{Matrix, Singular, dot};

/// Cosine of the angle of two rows that count as orthogonal.
const ORTHOGONAL: f64 = 1e-15;
/// Share of the squared norm of the matrix below which a product of rows is a rounding error.
const NEGLIGIBLE: f64 = 1e-32;
/// Maximum number of rounds over all pairs. About ten are usual.
const MAX_SWEEPS: usize = 40;

/// Returns all singular values. The matrix must not have more rows than columns.
pub(super) fn singular(mut matrix: Matrix) -> Singular {
    let count = matrix.rows;
    let mut left = Matrix::zeros(count, count);
    for row in 0..count {
        left.row_mut(row)[row] = 1.0;
    }
    let negligible = NEGLIGIBLE * dot(&matrix.elements, &matrix.elements);
    for _ in 0..MAX_SWEEPS {
        if !rotate_all(&mut matrix, &mut left, negligible) {
            break;
        }
    }
    let norms: Vec<f64> = (0..count).map(|row| dot(matrix.row(row), matrix.row(row)).sqrt()).collect();
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by(|&a, &b| norms[b].total_cmp(&norms[a]));
    let mut found = Singular {
        values: Vec::new(),
        left: Matrix::zeros(count, count),
        right: Matrix::zeros(count, matrix.columns),
    };
    for (to, &from) in order.iter().enumerate() {
        let norm = norms[from];
        found.values.push(norm);
        found.left.row_mut(to).copy_from_slice(left.row(from));
        if norm > 0.0 {
            for (element, x) in found.right.row_mut(to).iter_mut().zip(matrix.row(from)) {
                *element = x / norm;
            }
        }
    }
    found
}

/// Makes each pair of rows orthogonal, one pair after the other. Returns true if a pair was not.
fn rotate_all(matrix: &mut Matrix, left: &mut Matrix, negligible: f64) -> bool {
    let mut has_rotated = false;
    let mut squares: Vec<f64> = (0..matrix.rows).map(|row| dot(matrix.row(row), matrix.row(row))).collect();
    for first in 0..matrix.rows {
        for second in first + 1..matrix.rows {
            let product = dot(matrix.row(first), matrix.row(second));
            let bound = ORTHOGONAL * (squares[first] * squares[second]).max(0.0).sqrt() + negligible;
            if product.abs() <= bound || product.is_nan() {
                continue;
            }
            has_rotated = true;
            let ratio = (squares[second] - squares[first]) / (2.0 * product);
            let tangent = 1.0_f64.copysign(ratio) / (ratio.abs() + ratio.hypot(1.0));
            let cosine = 1.0 / tangent.hypot(1.0);
            for rows in [&mut *matrix, &mut *left] {
                let (a, b) = rows.two_rows_mut(first, second);
                rotate(a, b, cosine, cosine * tangent);
            }
            squares[first] -= tangent * product;
            squares[second] += tangent * product;
        }
    }
    has_rotated
}

fn rotate(a: &mut [f64], b: &mut [f64], cosine: f64, sine: f64) {
    for (x, y) in a.iter_mut().zip(b) {
        (*x, *y) = (cosine * *x - sine * *y, sine * *x + cosine * *y);
    }
}

#[cfg(test)]
mod tests {
    use super::super::matrix::tests::{product, pseudo_random};
    use super::*;

    /// Error of a product of float64 factors.
    const TOLERANCE: f64 = 1e-12;

    #[test]
    fn vectors_are_orthonormal_and_give_the_matrix() {
        for (rows, columns) in [(1, 1), (4, 4), (6, 20), (30, 33)] {
            let matrix = pseudo_random(rows, columns, 3);
            let found = singular(matrix.clone());
            assert!(found.values.is_sorted_by(|a, b| a >= b));
            let mut scaled = found.right.clone();
            for (row, value) in found.values.iter().enumerate() {
                scaled.row_mut(row).iter_mut().for_each(|x| *x *= value);
            }
            let again = product(&found.left.transposed(), &scaled);
            for (x, y) in again.elements.iter().zip(&matrix.elements) {
                assert!((x - y).abs() < TOLERANCE);
            }
            let gram = product(&found.right, &found.right.transposed());
            for (at, x) in gram.elements.iter().enumerate() {
                let expected = if at / rows == at % rows { 1.0 } else { 0.0 };
                assert!((x - expected).abs() < TOLERANCE);
            }
        }
    }

    #[test]
    fn a_matrix_of_rank_one_has_one_value() {
        let matrix = Matrix { rows: 2, columns: 3, elements: vec![3.0, 0.0, 4.0, 6.0, 0.0, 8.0] };
        let found = singular(matrix);
        assert!((found.values[0] - 125.0_f64.sqrt()).abs() < TOLERANCE);
        assert!(found.values[1] < TOLERANCE);
        assert!(singular(Matrix::zeros(2, 2)).values.iter().all(|&value| value == 0.0));
    }
}
