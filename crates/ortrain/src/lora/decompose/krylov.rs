//! Largest singular values of a large matrix, from the span of `V, (W^T W) V, (W^T W)^2 V, ...` for random columns `V`.
//!
//! (G. Golub, F. Luk and M. Overton, "A Block Lanczos Method for Computing the Singular Values and Corresponding Singular
//! Vectors of a Matrix", 1981.) Each product is made orthogonal to all columns. Otherwise rounding errors would repeat a
//! singular value.

use ortrain_expr::random_bits;

use super::jacobi;
use super::matrix::{Matrix, Singular};

/// Columns that are multiplied at once.
const WIDTH: usize = 16;
/// Columns beyond the rank: the first values converge faster, and equal values are found together.
const EXTRA: usize = 8;
/// Number of columns between restarts, if the number of products stays in the range below.
const COLUMNS_PER_CYCLE: usize = 480;
const MIN_PRODUCTS_PER_CYCLE: usize = 4;
const MAX_PRODUCTS_PER_CYCLE: usize = 12;
/// Maximum number of restarts. More are needed only if values near the last one differ by less than 1 %: any choice of
/// them has the same share of the weight then.
const MAX_CYCLES: usize = 4;
/// Error `W^T u - s v` of each vector, relative to the largest value, at which the method ends.
const TOLERANCE: f64 = 1e-11;
/// Share of a column below which the part that is orthogonal to all others is a rounding error.
const ROUNDING: f64 = 1e-13;

type Row = [f64; WIDTH];

/// Columns of a matrix, in the order of its rows.
type Panel = Vec<Row>;

/// Returns the largest singular values.
pub(super) fn leading_singular(matrix: &Matrix, rank: usize) -> Singular {
    let panels = (rank + EXTRA).div_ceil(WIDTH);
    let products =
        (COLUMNS_PER_CYCLE / (panels * WIDTH)).clamp(MIN_PRODUCTS_PER_CYCLE, MAX_PRODUCTS_PER_CYCLE);
    let mut draw = Draw { next: 0 };
    let mut start: Vec<Panel> =
        (0..panels).map(|_| (0..matrix.columns).map(|_| draw.row()).collect()).collect();
    let mut cycle = 0;
    loop {
        let found = run_cycle(matrix, start, panels * products, &mut draw);
        cycle += 1;
        if cycle == MAX_CYCLES || residual(matrix, &found, rank) <= TOLERANCE * found.values[0] {
            return found.truncated(rank);
        }
        start = (0..panels).map(|panel| columns_of(&found.right, panel * WIDTH)).collect();
    }
}

/// Returns the singular values in the span of `count` panels of columns.
fn run_cycle(matrix: &Matrix, start: Vec<Panel>, count: usize, draw: &mut Draw) -> Singular {
    let mut right: Vec<Panel> = Vec::new();
    for panel in start {
        right.push(orthonormal(panel, &right, draw).0);
    }
    let mut left: Vec<Panel> = Vec::new();
    // Coefficients of the products: `W V = U C` for the columns `U` on the left.
    let mut small = Matrix::zeros(count * WIDTH, count * WIDTH);
    for at in 0..count {
        let (panel, coefficients) = orthonormal(multiply(matrix, &right[at]), &left, draw);
        left.push(panel);
        for (block, rows) in coefficients.iter().enumerate() {
            for (row, numbers) in rows.iter().enumerate() {
                small.row_mut(block * WIDTH + row)[at * WIDTH..][..WIDTH].copy_from_slice(numbers);
            }
        }
        if right.len() < count {
            right.push(orthonormal(multiply_transposed(matrix, &left[at]), &right, draw).0);
        }
    }
    let found = jacobi::singular(small);
    let kept = count.min(right.len()) * WIDTH;
    Singular {
        values: found.values,
        left: combined(&left, &found.left, kept),
        right: combined(&right, &found.right, kept),
    }
}

/// Returns the combinations of columns by the rows of a matrix of coefficients, as rows.
fn combined(panels: &[Panel], coefficients: &Matrix, count: usize) -> Matrix {
    let rows = panels.first().map_or(0, Vec::len);
    let mut found = Matrix::zeros(count, rows);
    for to in 0..count {
        let weights = coefficients.row(to);
        let line = found.row_mut(to);
        for (panel, weights) in panels.iter().zip(weights.chunks_exact(WIDTH)) {
            for (element, row) in line.iter_mut().zip(panel) {
                for lane in 0..WIDTH {
                    *element += row[lane] * weights[lane];
                }
            }
        }
    }
    found
}

/// Returns the largest error `W^T u - s v` of the first vectors.
fn residual(matrix: &Matrix, found: &Singular, rank: usize) -> f64 {
    let mut largest = 0.0_f64;
    for begin in (0..rank).step_by(WIDTH) {
        let product = multiply_transposed(matrix, &columns_of(&found.left, begin));
        let right = columns_of(&found.right, begin);
        for lane in 0..WIDTH.min(rank - begin) {
            let value = found.values[begin + lane];
            let square: f64 =
                product.iter().zip(&right).map(|(x, y)| (x[lane] - value * y[lane]).powi(2)).sum();
            largest = largest.max(square.sqrt());
        }
    }
    largest
}

/// Returns rows of a matrix as the columns of a panel.
fn columns_of(matrix: &Matrix, begin: usize) -> Panel {
    let mut panel = vec![[0.0; WIDTH]; matrix.columns];
    for lane in 0..WIDTH.min(matrix.rows - begin) {
        for (row, &element) in panel.iter_mut().zip(matrix.row(begin + lane)) {
            row[lane] = element;
        }
    }
    panel
}

/// Returns `W V`.
fn multiply(matrix: &Matrix, panel: &Panel) -> Panel {
    let line = |row: usize| {
        let mut sums = [0.0; WIDTH];
        for (&element, numbers) in matrix.row(row).iter().zip(panel) {
            for lane in 0..WIDTH {
                sums[lane] += element * numbers[lane];
            }
        }
        sums
    };
    (0..matrix.rows).map(line).collect()
}

/// Returns `W^T U`.
fn multiply_transposed(matrix: &Matrix, panel: &Panel) -> Panel {
    let mut sums = vec![[0.0; WIDTH]; matrix.columns];
    for (row, numbers) in panel.iter().enumerate() {
        for (sum, &element) in sums.iter_mut().zip(matrix.row(row)) {
            for lane in 0..WIDTH {
                sum[lane] += element * numbers[lane];
            }
        }
    }
    sums
}

/// Returns orthonormal columns, also orthogonal to `others`, and the coefficients of the panel in both. A column in the span
/// of the others is replaced by a random one. If the others span the space, the column is zero.
fn orthonormal(mut panel: Panel, others: &[Panel], draw: &mut Draw) -> (Panel, Vec<[Row; WIDTH]>) {
    let first = orthonormalize(&mut panel, others, draw);
    // The first pass may lose digits by cancellation; twice is enough.
    let second = orthonormalize(&mut panel, others, draw);
    let own = first[others.len()];
    let mut coefficients = first;
    coefficients[others.len()] = [[0.0; WIDTH]; WIDTH];
    for (sums, block) in coefficients.iter_mut().zip(&second) {
        for (sums, weights) in sums.iter_mut().zip(block) {
            for (weight, line) in weights.iter().zip(&own) {
                for lane in 0..WIDTH {
                    sums[lane] += weight * line[lane];
                }
            }
        }
    }
    (panel, coefficients)
}

fn orthonormalize(panel: &mut Panel, others: &[Panel], draw: &mut Draw) -> Vec<[Row; WIDTH]> {
    let before: Vec<f64> = (0..WIDTH).map(|lane| length(panel, lane)).collect();
    let mut coefficients: Vec<[Row; WIDTH]> = others.iter().map(|other| project(panel, other)).collect();
    let mut own = [[0.0; WIDTH]; WIDTH];
    for lane in 0..WIDTH {
        remove_earlier(panel, lane, &mut own);
        let mut norm = length(panel, lane);
        if norm > ROUNDING * before[lane] {
            own[lane][lane] = norm;
        } else {
            replace(panel, lane, others, draw);
            norm = length(panel, lane);
        }
        let factor = if norm > 0.0 { 1.0 / norm } else { 0.0 };
        panel.iter_mut().for_each(|row| row[lane] *= factor);
    }
    coefficients.push(own);
    coefficients
}

fn length(panel: &Panel, lane: usize) -> f64 {
    panel.iter().map(|row| row[lane] * row[lane]).sum::<f64>().sqrt()
}

/// Subtracts the part of a panel in the span of another one. Returns its coefficients.
fn project(panel: &mut Panel, other: &Panel) -> [Row; WIDTH] {
    let mut products = [[0.0; WIDTH]; WIDTH];
    for (row, numbers) in other.iter().zip(panel.iter()) {
        for (x, line) in row.iter().zip(&mut products) {
            for lane in 0..WIDTH {
                line[lane] += x * numbers[lane];
            }
        }
    }
    for (row, numbers) in other.iter().zip(panel.iter_mut()) {
        for (x, line) in row.iter().zip(&products) {
            for lane in 0..WIDTH {
                numbers[lane] -= x * line[lane];
            }
        }
    }
    products
}

/// Subtracts the parts of a column in the span of the columns before it.
fn remove_earlier(panel: &mut Panel, lane: usize, coefficients: &mut [Row; WIDTH]) {
    for earlier in 0..lane {
        let product: f64 = panel.iter().map(|row| row[earlier] * row[lane]).sum();
        panel.iter_mut().for_each(|row| row[lane] -= product * row[earlier]);
        coefficients[earlier][lane] += product;
    }
}

/// Replaces a column by a random column, orthogonal to all others. If the others span the space, the column is zero.
fn replace(panel: &mut Panel, lane: usize, others: &[Panel], draw: &mut Draw) {
    let mut random: Panel = vec![[0.0; WIDTH]; panel.len()];
    random.iter_mut().for_each(|row| row[lane] = draw.number());
    let before = length(&random, lane);
    for _ in 0..2 {
        for other in others {
            project(&mut random, other);
        }
        for (to, row) in panel.iter_mut().zip(&random) {
            to[lane] = row[lane];
        }
        remove_earlier(panel, lane, &mut [[0.0; WIDTH]; WIDTH]);
        for (from, row) in panel.iter().zip(&mut random) {
            row[lane] = from[lane];
        }
    }
    if length(panel, lane) <= ROUNDING * before {
        panel.iter_mut().for_each(|row| row[lane] = 0.0);
    }
}

/// Random numbers, the same on every machine.
struct Draw {
    next: u64,
}

impl Draw {
    /// Returns a number from -1 to 1.
    fn number(&mut self) -> f64 {
        self.next += 1;
        f64::from(random_bits(0, 0, self.next)) / f64::from(u32::MAX) * 2.0 - 1.0
    }

    fn row(&mut self) -> Row {
        std::array::from_fn(|_| self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::super::matrix::tests::{product, pseudo_random};
    use super::*;
    use crate::lora::decompose::qr::leading_qr;

    /// Error of the values, relative to the largest.
    const VALUE_TOLERANCE: f64 = 1e-9;

    /// Returns a matrix with singular values.
    fn with_values(rows: usize, columns: usize, values: &[f64]) -> Matrix {
        let left = leading_qr(&pseudo_random(rows, values.len(), 5), values.len()).q;
        let mut right = leading_qr(&pseudo_random(columns, values.len(), 6), values.len()).q.transposed();
        for (row, value) in values.iter().enumerate() {
            right.row_mut(row).iter_mut().for_each(|x| *x *= value);
        }
        product(&left, &right)
    }

    #[test]
    fn values_of_a_product_are_found() {
        let falling: Vec<f64> = (0..70).map(|at| 0.9_f64.powi(at)).collect();
        let equal = [vec![3.0; 20], vec![1.0; 50]].concat();
        for (values, rank) in [(&falling, 5), (&falling, 12), (&equal, 20), (&equal, 24)] {
            for (rows, columns) in [(90, 70), (70, 200)] {
                let found = leading_singular(&with_values(rows, columns, values), rank);
                assert_eq!((found.values.len(), found.left.rows, found.right.columns), (rank, rank, columns));
                for (x, y) in found.values.iter().zip(values) {
                    assert!((x - y).abs() < VALUE_TOLERANCE * values[0], "{x} {y}");
                }
            }
        }
    }

    #[test]
    fn a_matrix_of_small_rank_has_zeros() {
        let found = leading_singular(&with_values(80, 75, &[2.0, 1.0]), 4);
        assert!((found.values[1] - 1.0).abs() < VALUE_TOLERANCE);
        assert!(found.values[2] < VALUE_TOLERANCE);
        let zeros = leading_singular(&Matrix::zeros(80, 75), 4);
        assert!(zeros.values.iter().all(|&value| value == 0.0));
    }
}
