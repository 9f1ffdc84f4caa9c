//! Matrices of float64 in the order of their rows.

/// Matrix.
#[derive(Clone)]
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) elements: Vec<f64>,
}

impl Matrix {
    pub(super) fn zeros(rows: usize, columns: usize) -> Matrix {
        Matrix { rows, columns, elements: vec![0.0; rows * columns] }
    }

    pub(crate) fn row(&self, row: usize) -> &[f64] {
        &self.elements[row * self.columns..][..self.columns]
    }

    pub(super) fn row_mut(&mut self, row: usize) -> &mut [f64] {
        &mut self.elements[row * self.columns..][..self.columns]
    }

    /// Returns two rows; `first` is less than `second`.
    pub(super) fn two_rows_mut(&mut self, first: usize, second: usize) -> (&mut [f64], &mut [f64]) {
        let (begin, end) = self.elements.split_at_mut(second * self.columns);
        (&mut begin[first * self.columns..][..self.columns], &mut end[..self.columns])
    }

    pub(crate) fn transposed(&self) -> Matrix {
        let mut found = Matrix::zeros(self.columns, self.rows);
        for row in 0..self.rows {
            for (column, &element) in self.row(row).iter().enumerate() {
                found.elements[column * self.rows + row] = element;
            }
        }
        found
    }
}

/// Singular values of a matrix, largest first, with their vectors as rows.
pub(crate) struct Singular {
    /// Values.
    pub(crate) values: Vec<f64>,
    /// Left vectors: a matrix `[values, rows]`.
    pub(crate) left: Matrix,
    /// Right vectors: a matrix `[values, columns]`.
    pub(crate) right: Matrix,
}

impl Singular {
    /// Returns the first values.
    pub(super) fn truncated(self, rank: usize) -> Singular {
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

/// Returns the sum of the products of two vectors.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    let (mut blocks_a, mut blocks_b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (x, y) in (&mut blocks_a).zip(&mut blocks_b) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * y[lane];
        }
    }
    let rest: f64 = blocks_a.remainder().iter().zip(blocks_b.remainder()).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
pub(super) mod tests {
    use ortrain_expr::random_bits;

    use super::Matrix;

    /// Returns a matrix of uniform numbers from -1 to 1.
    pub(crate) fn pseudo_random(rows: usize, columns: usize, seed: u64) -> Matrix {
        let number = |at: usize| f64::from(random_bits(seed, 0, at as u64)) / f64::from(u32::MAX) * 2.0 - 1.0;
        Matrix { rows, columns, elements: (0..rows * columns).map(number).collect() }
    }

    pub(crate) fn product(a: &Matrix, b: &Matrix) -> Matrix {
        let mut found = Matrix::zeros(a.rows, b.columns);
        for row in 0..a.rows {
            for (k, x) in a.row(row).iter().enumerate() {
                for (sum, y) in found.row_mut(row).iter_mut().zip(b.row(k)) {
                    *sum += x * y;
                }
            }
        }
        found
    }
}
