//! First columns of the QR factorization of a matrix, in float64.

use super::matrix::Matrix;

/// First factors of a QR factorization.
pub(crate) struct LeadingQr {
    /// Orthonormal columns, as a matrix `[rows, rank]`.
    pub(crate) q: Matrix,
    /// Upper triangle, as a matrix `[rank, columns]`.
    pub(crate) r: Matrix,
}

/// Returns the first `rank` columns of `Q` and rows of `R`, with the signs of LAPACK: Householder's reflections make each
/// element of the diagonal from the column below it.
pub(crate) fn leading_qr(matrix: &Matrix, rank: usize) -> LeadingQr {
    let (rows, columns) = (matrix.rows, matrix.columns);
    let mut r = matrix.clone();
    let mut reflections: Vec<(f64, Vec<f64>)> = Vec::with_capacity(rank);
    for k in 0..rank {
        let mut v: Vec<f64> = (k..rows).map(|row| r.row(row)[k]).collect();
        let first = v[0];
        let rest = v[1..].iter().map(|x| x * x).sum::<f64>().sqrt();
        if rest == 0.0 {
            reflections.push((0.0, v));
            continue;
        }
        let diagonal = -first.hypot(rest).copysign(first);
        let factor = (diagonal - first) / diagonal;
        for x in &mut v[1..] {
            *x /= first - diagonal;
        }
        v[0] = 1.0;
        reflect(&mut r, k, factor, &v);
        reflections.push((factor, v));
    }
    let mut q = Matrix::zeros(rows, rank);
    for k in 0..rank {
        q.row_mut(k)[k] = 1.0;
    }
    for (k, (factor, v)) in reflections.iter().enumerate().rev() {
        reflect(&mut q, k, *factor, v);
    }
    let mut triangle = Matrix::zeros(rank, columns);
    for k in 0..rank {
        triangle.row_mut(k)[k..].copy_from_slice(&r.row(k)[k..]);
    }
    LeadingQr { q, r: triangle }
}

/// Applies the reflection `I - factor * v v^T` to the rows from `begin`.
fn reflect(matrix: &mut Matrix, begin: usize, factor: f64, v: &[f64]) {
    if factor == 0.0 {
        return;
    }
    let mut sums = vec![0.0; matrix.columns];
    for (row, &x) in (begin..).zip(v) {
        for (sum, element) in sums.iter_mut().zip(matrix.row(row)) {
            *sum += x * element;
        }
    }
    for (row, &x) in (begin..).zip(v) {
        let weight = factor * x;
        for (element, sum) in matrix.row_mut(row).iter_mut().zip(&sums) {
            *element -= weight * sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::matrix::tests::{product, pseudo_random};
    use super::*;

    /// Error of a product of float64 factors.
    const TOLERANCE: f64 = 1e-12;

    #[test]
    fn full_factors_give_the_matrix() {
        for (rows, columns) in [(5, 5), (7, 3), (3, 7), (1, 4), (4, 1)] {
            let matrix = pseudo_random(rows, columns, 1);
            let rank = rows.min(columns);
            let LeadingQr { q, r } = leading_qr(&matrix, rank);
            let found = product(&q, &r);
            for (x, y) in found.elements.iter().zip(&matrix.elements) {
                assert!((x - y).abs() < TOLERANCE, "{rows} x {columns}: {x} {y}");
            }
            let gram = product(&q.transposed(), &q);
            for (at, x) in gram.elements.iter().enumerate() {
                let expected = if at / rank == at % rank { 1.0 } else { 0.0 };
                assert!((x - expected).abs() < TOLERANCE);
            }
        }
    }

    #[test]
    fn a_leading_part_is_the_begin_of_the_factors() {
        let matrix = pseudo_random(9, 6, 2);
        let (full, part) = (leading_qr(&matrix, 6), leading_qr(&matrix, 2));
        assert_eq!(part.r.elements, full.r.elements[..12]);
        for row in 0..9 {
            for (x, y) in part.q.row(row).iter().zip(full.q.row(row)) {
                assert!((x - y).abs() < TOLERANCE);
            }
        }
    }

    #[test]
    fn a_zero_matrix_has_the_identity_as_q() {
        let LeadingQr { q, r } = leading_qr(&Matrix::zeros(3, 2), 2);
        assert_eq!(q.elements, [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
        assert_eq!(r.elements, [0.0; 4]);
    }
}
