//! Values of constants: detects tables that a formula computed, and distinguishes them from weights.

use ortrain_graph::{DType, Tensor};

/// Tolerance of the recurrence between neighbours in a column of sines, relative to the column's largest element.
/// Tables are stored in types as narrow as bfloat16, with eight bits. In other tables, neighbours differ by about their
/// magnitude.
const SINE_TOLERANCE: f64 = 0.02;
/// Twice the cosine of the angle between neighbours below which a column of sines differs from a line.
const TURNING: f64 = 1.9;
/// Number of rows of a table that are tested before the complete table.
const FIRST_ROWS: usize = 64;
/// Minimum number of equations that columns of sines satisfy beyond their unknowns: fewer may be satisfied by chance.
const MIN_EVIDENCE: usize = 16;
/// Tolerance of the steps of a progression, relative to its largest element: a few rounding errors of float32.
const STEP_TOLERANCE: f64 = 1e-5;
/// Minimum number of elements of a progression of integers, and of one with fractions.
const MIN_COUNT: usize = 3;
const MIN_PROGRESSION: usize = 4;
/// Maximum number of decimals of a number in a program, and the magnitude from which float32 has no more decimals.
const MAX_DECIMALS: i32 = 3;
const LARGEST_DECIMAL: f64 = 4096.0;
/// Maximum number of coordinates of a point, or of numbers of a box.
const MAX_COORDINATES: usize = 4;
/// Maximum number of elements of a table with a formula. Larger constants of models are weights.
const MAX_REGULAR: usize = 1 << 22;
/// Maximum fraction of the elements of a coordinate at which its step changes. In a grid three columns wide it is two
/// thirds; in random signs it is three quarters.
const MAX_BREAKS: f64 = 0.7;
/// Tolerance of the norm of a vector of a power iteration: it was divided by its norm in float32.
const UNIT_TOLERANCE: f64 = 1e-3;

/// Returns one element of a tensor of floats.
pub(super) fn element(tensor: &Tensor, at: usize) -> Option<f64> {
    let size = tensor.dtype().size();
    let bytes = tensor.data().get(at * size..(at + 1) * size)?;
    Some(match tensor.dtype() {
        DType::F32 => f32::from_le_bytes(bytes.try_into().ok()?).into(),
        DType::F64 => f64::from_le_bytes(bytes.try_into().ok()?),
        DType::F16 => half::f16::from_le_bytes(bytes.try_into().ok()?).into(),
        DType::BF16 => half::bf16::from_le_bytes(bytes.try_into().ok()?).into(),
        _ => return None,
    })
}

fn elements(tensor: &Tensor) -> impl Iterator<Item = f64> + '_ {
    (0..tensor.len()).map(|at| element(tensor, at).unwrap_or(f64::NAN))
}

/// Returns true if all elements have this value.
pub(super) fn is_filled_with(tensor: &Tensor, value: f64) -> bool {
    elements(tensor).all(|element| element == value)
}

/// Returns true if all elements are equal.
pub(super) fn is_constant(tensor: &Tensor) -> bool {
    element(tensor, 0).is_some_and(|first| is_filled_with(tensor, first))
}

/// Returns true if at least half of the elements repeat others, and not all are equal: a table of coordinates.
pub(super) fn repeats_values(tensor: &Tensor) -> bool {
    let mut values: Vec<f64> = elements(tensor).collect();
    values.sort_unstable_by(f64::total_cmp);
    values.dedup();
    (2..=tensor.len() / 2).contains(&values.len())
}

/// Returns true for a vector of norm one.
pub(super) fn is_unit_vector(tensor: &Tensor) -> bool {
    let long_axes = tensor.dims().iter().filter(|&&size| size > 1).count();
    let norm = elements(tensor).map(|value| value * value).sum::<f64>().sqrt();
    long_axes <= 1 && (norm - 1.0).abs() <= UNIT_TOLERANCE
}

/// Returns true if every element has at most [`MAX_DECIMALS`] decimals, and not all are zeros, ones or equal: means and
/// deviations in a program. Narrow types have such a decimal near every number.
pub(super) fn are_short_decimals(tensor: &Tensor) -> bool {
    let scale = 10_f64.powi(MAX_DECIMALS);
    let is_short = |value: f64| {
        let nearest = (value * scale).round() / scale;
        let stored = if tensor.dtype() == DType::F32 { f64::from(nearest as f32) } else { nearest };
        value.abs() < LARGEST_DECIMAL && stored == value
    };
    [DType::F32, DType::F64].contains(&tensor.dtype())
        && tensor.len() >= MIN_COUNT
        && elements(tensor).all(is_short)
        && elements(tensor).any(|value| value != 0.0 && value != 1.0)
        && !is_constant(tensor)
}

/// Returns true if the elements, in one row, are consecutive integers.
pub(super) fn is_consecutive(tensor: &Tensor) -> bool {
    let long_axes = tensor.dims().iter().filter(|&&size| size > 1).count();
    let mut values = elements(tensor);
    let first = values.next().unwrap_or(f64::NAN);
    long_axes == 1
        && tensor.len() >= MIN_COUNT
        && first.fract() == 0.0
        && values.zip(1_u32..).all(|(value, index)| value == first + f64::from(index))
}

/// Returns the formula of a regular table, as a part of a sentence: consecutive numbers, points of a grid, strides,
/// sizes of boxes.
///
/// Untrained parameters may be a progression of fractions. Such a progression counts only if `fractions` is true.
pub(super) fn regular_formula(tensor: &Tensor, fractions: bool) -> Option<&'static str> {
    if tensor.len() > MAX_REGULAR {
        return None;
    }
    let values: Vec<f64> = elements(tensor).collect();
    let largest = values.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
    if values.len() < MIN_COUNT
        || !largest.is_finite()
        || values.iter().any(|value| value.is_nan())
        || is_constant(tensor)
    {
        return None;
    }
    let dims: Vec<usize> = tensor.dims().iter().copied().filter(|&size| size != 1).collect();
    let are_halves = values.iter().all(|value| (2.0 * value).fract() == 0.0);
    if dims.len() == 1 && (are_halves || fractions) {
        if is_progression(&values, largest) {
            return Some("its elements are evenly spaced");
        }
        if is_geometric(&values) {
            return Some("its elements grow by a constant factor");
        }
    }
    let row = dims.last().copied().unwrap_or(0);
    if dims.len() > 1 && row >= MIN_PROGRESSION && values.chunks(row).all(|row| is_progression(row, largest))
    {
        return Some("the elements of each row are evenly spaced");
    }
    let columns: [Option<(usize, usize)>; 3] = [
        // Points in the rows of a table, points along a first axis, one number for each point.
        dims.last().filter(|&&size| dims.len() > 1 && size <= MAX_COORDINATES).map(|&size| (size, 1)),
        dims.first()
            .filter(|&&size| dims.len() > 1 && size <= MAX_COORDINATES)
            .map(|&size| (size, values.len() / size)),
        (dims.len() == 1 && are_halves && largest >= 2.0).then_some((1, values.len())),
    ];
    for (count, stride) in columns.into_iter().flatten() {
        let column = |index: usize| -> Vec<f64> {
            if stride == 1 {
                values.iter().skip(index).step_by(count).copied().collect()
            } else {
                values[index * stride..(index + 1) * stride].to_vec()
            }
        };
        // A grid may have columns with a single value: homogeneous coordinates do.
        let is_part =
            |column: &[f64]| is_coordinate(column, largest) || column.iter().all(|&value| value == column[0]);
        if (0..count).any(|index| is_coordinate(&column(index), largest))
            && (0..count).all(|index| is_part(&column(index)))
        {
            return Some(if count == 1 {
                "its elements are blocks of a few values, like strides"
            } else {
                "its elements are the points of a grid"
            });
        }
    }
    if largest < 2.0 || values.iter().any(|value| value.fract() != 0.0) {
        return None;
    }
    let mut distinct = values;
    distinct.sort_unstable_by(f64::total_cmp);
    distinct.dedup();
    (distinct.len() >= MIN_COUNT).then_some("its elements are whole numbers")
}

/// Returns true if neighbours differ by a constant nonzero step.
fn is_progression(values: &[f64], largest: f64) -> bool {
    let are_integers = values.iter().all(|value| value.fract() == 0.0);
    let step = values[1] - values[0];
    values.len() >= if are_integers { MIN_COUNT } else { MIN_PROGRESSION }
        && step.abs() > STEP_TOLERANCE * largest
        && values.windows(2).all(|pair| (pair[1] - pair[0] - step).abs() <= STEP_TOLERANCE * largest)
}

/// Returns true if neighbours differ by a constant positive factor other than one.
fn is_geometric(values: &[f64]) -> bool {
    let factor = values[1] / values[0];
    values.len() >= MIN_PROGRESSION
        && values.iter().all(|&value| value != 0.0)
        && factor > 0.0
        && (factor - 1.0).abs() > STEP_TOLERANCE
        && values.windows(2).all(|pair| (pair[1] / pair[0] / factor - 1.0).abs() <= STEP_TOLERANCE)
}

/// Returns true for a coordinate of the points of a grid, in the order of its rows or columns: the step between points
/// changes at few points, and has few values. Only zeros and ones are a mask or untrained weights.
fn is_coordinate(values: &[f64], largest: f64) -> bool {
    let is_fresh = values.iter().all(|&value| value == 0.0 || value == 1.0 || value == values[0]);
    if values.len() < MIN_PROGRESSION || is_fresh {
        return false;
    }
    let steps: Vec<f64> = values.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let tolerance = STEP_TOLERANCE * largest;
    let breaks = steps.windows(2).filter(|pair| (pair[1] - pair[0]).abs() > tolerance).count();
    let mut distinct = steps.clone();
    distinct.sort_unstable_by(f64::total_cmp);
    distinct.dedup_by(|next, last| *next - *last <= tolerance);
    breaks as f64 <= MAX_BREAKS * (steps.len() - 1) as f64 && distinct.len() <= 2.max(values.len() / 4)
}

/// Returns true for filters of a convolution that are equal for all channels, and not constant: a blur.
pub(super) fn is_fixed_filter(tensor: &Tensor) -> bool {
    let [channels, 1, ref kernel @ ..] = tensor.dims()[..] else { return false };
    let size: usize = kernel.iter().product();
    let Some(bytes) =
        tensor.len().checked_div(channels).filter(|&filter_len| filter_len == size && channels > 1)
    else {
        return false;
    };
    let bytes = bytes * tensor.dtype().size();
    let first = &tensor.data()[..bytes];
    let varies = (1..size).any(|at| element(tensor, at) != element(tensor, 0));
    varies && tensor.data().chunks(bytes).all(|filter| filter == first)
}

/// Returns true if the two halves of each row, or neighbours in it, are sines and cosines of the same angles: the cache
/// of a rotary embedding.
pub(super) fn is_pairs_of_sines(tensor: &Tensor) -> bool {
    let dims: Vec<usize> = tensor.dims().iter().copied().filter(|&size| size != 1).collect();
    let [rows, columns] = dims[..] else { return false };
    if columns % 2 != 0 || rows.saturating_mul(columns) / 2 < MIN_EVIDENCE || is_constant(tensor) {
        return false;
    }
    let half = columns / 2;
    let are_pairs = |indices: &dyn Fn(usize) -> (usize, usize)| {
        (0..rows * half).all(|at| {
            let (first, second) = indices(at % half);
            let [a, b] = [first, second]
                .map(|column| element(tensor, at / half * columns + column).unwrap_or(f64::NAN));
            (a * a + b * b - 1.0).abs() <= SINE_TOLERANCE
        })
    };
    are_pairs(&|column| (column, column + half)) || are_pairs(&|column| (2 * column, 2 * column + 1))
}

/// Returns true if the elements are zeros and ones, and both occur.
pub(super) fn is_mask(tensor: &Tensor) -> bool {
    elements(tensor).all(|value| value == 0.0 || value == 1.0) && !is_constant(tensor)
}

/// Returns true if the columns of a table are sines and cosines of the row index. In each column, the sum of the
/// neighbours of an element is the element times twice the cosine of one angle.
pub(super) fn is_table_of_sines(tensor: &Tensor) -> bool {
    let dims: Vec<usize> = tensor.dims().iter().copied().filter(|&size| size != 1).collect();
    let [rows, columns] = dims[..] else { return false };
    let mut turns = false;
    let mut fits = |first: usize, rows: usize| {
        (0..columns).all(|column| {
            let at = |row: usize| element(tensor, row * columns + column).unwrap_or(f64::NAN);
            let (mut product, mut square, mut largest) = (0.0, 0.0, 0.0_f64);
            for row in first + 1..rows - 1 {
                product += at(row) * (at(row - 1) + at(row + 1));
                square += at(row) * at(row);
                largest = largest.max(at(row).abs());
            }
            let twice_cosine = if square > 0.0 { product / square } else { 2.0 };
            turns |= twice_cosine.abs() < TURNING && largest > 0.0;
            let distance = |row: usize| (at(row - 1) + at(row + 1) - twice_cosine * at(row)).abs();
            // Comparisons with NaN are false.
            (first + 1..rows - 1).all(|row| distance(row) <= SINE_TOLERANCE * largest)
        })
    };
    // The first row of a cosine transform has a factor of its own.
    (0..2).any(|first| {
        columns.saturating_mul(rows.saturating_sub(3 + first)) >= MIN_EVIDENCE
            && fits(first, rows.min(FIRST_ROWS))
            && fits(first, rows)
    }) && turns
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(dims: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_slice(DType::F32, dims, values)
    }

    #[test]
    fn regular_tables() {
        let grid: Vec<f32> = (0..20).flat_map(|at| [(at % 5) as f32 + 0.5, (at / 5) as f32 + 0.5]).collect();
        let planes: Vec<f32> = (0..2).flat_map(|axis| grid.iter().skip(axis).step_by(2).copied()).collect();
        let strides = [[8.0_f32; 16].as_slice(), &[16.0; 4], &[32.0]].concat();
        for (dims, values, formula) in [
            (vec![6], vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "its elements are evenly spaced"),
            (vec![1, 5], vec![-1.0, -0.5, 0.0, 0.5, 1.0], "its elements are evenly spaced"),
            (vec![4], vec![1.0, 2.0, 4.0, 8.0], "its elements grow by a constant factor"),
            (vec![20, 2], grid, "its elements are the points of a grid"),
            (vec![1, 2, 4, 5], planes, "its elements are the points of a grid"),
            (vec![21, 1], strides, "its elements are blocks of a few values, like strides"),
            (
                vec![2, 1, 4],
                vec![0.0, 0.25, 0.5, 0.75, 0.0, 0.1, 0.2, 0.3],
                "the elements of each row are evenly spaced",
            ),
            (vec![3, 2], vec![10.0, 13.0, 16.0, 30.0, 33.0, 23.0], "its elements are whole numbers"),
        ] {
            assert_eq!(regular_formula(&tensor(&dims, &values), true), Some(formula), "{dims:?} {values:?}");
        }
    }

    #[test]
    fn weights_are_not_regular() {
        let signs: Vec<f32> = (0..64_u64)
            .map(|at| if at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 63 == 1 { 1.0 } else { -1.0 })
            .collect();
        for (dims, values) in [
            (vec![8], vec![0.0; 8]),
            (vec![4], vec![1.0; 4]),
            (vec![8], vec![0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
            (vec![3], vec![0.1, 0.2, 0.3]),
            (vec![5], vec![0.3, -0.1, 0.25, 0.9, -0.4]),
            (vec![2, 3], vec![0.3, -0.1, 0.25, 0.9, -0.4, 0.7]),
            (vec![16, 4], signs),
            (vec![8], vec![1e-6, 1e-6, 1e-6, 1e-6, 1.0, 1.0, 1.0, 1.0]),
            (vec![2], vec![1.0, 2.0]),
        ] {
            assert_eq!(regular_formula(&tensor(&dims, &values), true), None, "{dims:?} {values:?}");
        }
    }

    #[test]
    fn short_decimals() {
        for values in [vec![0.485, 0.456, 0.406], vec![0.64, 0.5, 5.17, 4.84, 12.72, 2.19]] {
            assert!(are_short_decimals(&tensor(&[1, values.len()], &values)), "{values:?}");
        }
        let random: Vec<f32> = (1..9_u8).map(|at| (f32::from(at) * 0.7).sin()).collect();
        for values in [vec![0.0, 1.0, 1.0], vec![0.25; 4], vec![0.5, 0.25], random] {
            assert!(!are_short_decimals(&tensor(&[values.len()], &values)), "{values:?}");
        }
    }

    #[test]
    fn pairs_of_sines() {
        let angles: Vec<f32> = (0..24_u8).map(|at| 0.7 * f32::from(at) + 0.1).collect();
        let halves: Vec<f32> = angles
            .chunks(3)
            .flat_map(|row| row.iter().map(|x| x.sin()).chain(row.iter().map(|x| x.cos())))
            .collect();
        let neighbours: Vec<f32> = angles.iter().flat_map(|x| [x.sin(), x.cos()]).collect();
        for values in [&halves, &neighbours] {
            assert!(is_pairs_of_sines(&tensor(&[1, 8, 6], values)));
        }
        assert!(!is_pairs_of_sines(&tensor(&[8, 6], &[angles.clone(), angles].concat())));
        assert!(!is_pairs_of_sines(&tensor(&[8, 6], &[0.5_f32.sqrt(); 48])));
    }

    #[test]
    fn filters() {
        let blur = [0.25, 0.5, 0.25].repeat(4);
        assert!(is_fixed_filter(&tensor(&[4, 1, 3], &blur)));
        for (dims, values) in
            [([4, 1, 3], vec![0.5; 12]), ([1, 1, 3], vec![0.25, 0.5, 0.25]), ([2, 2, 3], blur.clone())]
        {
            assert!(!is_fixed_filter(&tensor(&dims, &values)), "{dims:?}");
        }
    }

    #[test]
    fn fractions_may_be_fresh_parameters() {
        for values in [[0.0, 0.25, 0.5, 0.75], [0.125, 0.25, 0.5, 1.0]] {
            let table = tensor(&[1, 1, 4], &values);
            assert!(
                regular_formula(&table, true).is_some() && regular_formula(&table, false).is_none(),
                "{values:?}"
            );
        }
        assert_eq!(regular_formula(&tensor(&[4, 2], &[0.0, 0.7, 0.0, 0.7, 0.0, 0.7, 0.0, 0.7]), true), None);
        assert!(!is_table_of_sines(&tensor(&[4, 6], &[0.3, -0.1, 0.25, 0.9, -0.4, 0.7].repeat(4))));
    }

    #[test]
    fn vectors() {
        assert!(is_unit_vector(&tensor(&[2], &[0.6, 0.8])) && !is_unit_vector(&tensor(&[2], &[1.0, 1.0])));
        assert!(
            is_consecutive(&tensor(&[1, 4, 1, 1], &[0.0, 1.0, 2.0, 3.0]))
                && !is_consecutive(&tensor(&[2, 2], &[0.0, 1.0, 2.0, 3.0]))
        );
        let coordinates = tensor(&[3, 2], &[-1.0, -1.0, 0.0, -1.0, 1.0, -1.0]);
        assert!(repeats_values(&coordinates) && !repeats_values(&tensor(&[2, 2], &[1.0, 1.0, 1.0, 1.0])));
    }
}
