//! Matrix products.

use ortrain_expr::{Access, DType, Dims, Precision};
use ortrain_program::{MatMul, Operand};

use super::epilogue::{EPILOGUES, Epilogue};
use super::test_program::{TestProgram, TestProgramBuilder};

/// Memory layout of a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Plain,
    Transposed,
    /// Every second element.
    Strided,
    /// One repeated row.
    OneRow,
    /// One repeated column.
    OneColumn,
}

const LAYOUTS: [Layout; 5] =
    [Layout::Plain, Layout::Transposed, Layout::Strided, Layout::OneRow, Layout::OneColumn];

impl Layout {
    /// Returns an access to a batch of matrices, or to one matrix for the whole batch.
    fn access(self, batch: &[usize], [rows, columns]: [usize; 2], is_one: bool) -> Access {
        let (row, column) = (rows as isize, columns as isize);
        let (line_step, step) = match self {
            Layout::Plain => ([column, 1], row * column),
            Layout::Transposed => ([1, row], row * column),
            Layout::Strided => ([2 * column, 2], 2 * row * column),
            Layout::OneRow => ([0, 1], column),
            Layout::OneColumn => ([1, 0], row),
        };
        let step = if is_one { 0 } else { step };
        let strides = batch.iter().map(|_| step).chain(line_step).collect();
        let dims: Vec<usize> = batch.iter().copied().chain([rows, columns]).collect();
        let mut access = Access { dtype: DType::F32, offset: 3, strides, len: usize::MAX };
        access.len = access.position_range(&dims).map_or(0, |(_, high)| high as usize + 1);
        access
    }
}

/// Matrix product under test.
#[derive(Clone, Debug)]
struct Product {
    batch: Vec<usize>,
    sides: [usize; 3],
    layouts: [Layout; 2],
    precision: Precision,
    /// Types that the factors are rounded to.
    rounded: [Option<DType>; 2],
    finish: Epilogue,
}

impl Product {
    fn plain(sides: [usize; 3]) -> Product {
        Product {
            batch: Vec::new(),
            sides,
            layouts: [Layout::Plain; 2],
            precision: Precision::F32,
            rounded: [None; 2],
            finish: Epilogue::Store,
        }
    }

    fn build(&self) -> TestProgram {
        let mut test = TestProgramBuilder::new(self.precision);
        let [m, n, k] = self.sides;
        let accesses = [(self.layouts[0], [m, k], false), (self.layouts[1], [k, n], self.batch.len() > 1)]
            .map(|(layout, size, is_one)| layout.access(&self.batch, size, is_one));
        let [a, b] = accesses.map(|access| Operand { buffer: test.random(access.len), access });
        let dims: Vec<usize> = self.batch.iter().copied().chain([m, n]).collect();
        let epilogue = self.finish.nest(&mut test, &dims);
        let batch = Dims::from_slice(&self.batch);
        let (precision, rounded) = (self.precision.for_product(self.sides), self.rounded);
        test.emit(MatMul { batch, m, n, k, a, b, rounded, precision, epilogue });
        test.finish()
    }

    fn assert_agrees(&self) {
        self.build().assert_agrees(&format!("{self:?}"));
    }
}

const EDGES: [usize; 12] = [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 130];

#[test]
fn products_at_the_edges_of_tiles() {
    for (i, &m) in EDGES.iter().enumerate() {
        for (j, &n) in EDGES.iter().enumerate() {
            let at = i * EDGES.len() + j;
            let k = [1, 15, 16, 17, 40][at % 5];
            let layouts = [LAYOUTS[(at / 2) % 3], LAYOUTS[(at / 6) % 3]];
            Product { layouts, finish: EPILOGUES[at % 4], ..Product::plain([m, n, k]) }.assert_agrees();
        }
    }
}

#[test]
fn products_of_any_layout() {
    for a in LAYOUTS {
        for b in LAYOUTS {
            for (sides, batch) in [([33, 65, 19], vec![2]), ([3, 70, 50], vec![2, 2]), ([70, 8, 33], vec![])]
            {
                Product { layouts: [a, b], batch, ..Product::plain(sides) }.assert_agrees();
            }
        }
    }
}

/// Split-K products.
#[test]
fn split_k_products() {
    for (at, sides) in
        [[64, 64, 4096], [65, 33, 4096], [9, 40, 700], [1, 1, 4096], [8, 33, 1500], [100, 2, 4100]]
            .into_iter()
            .enumerate()
    {
        for layouts in [[Layout::Plain; 2], [Layout::Transposed; 2], [Layout::Strided, Layout::OneColumn]] {
            let batch = if at % 2 == 0 { vec![] } else { vec![2] };
            Product { layouts, finish: EPILOGUES[at % 4], batch, ..Product::plain(sides) }.assert_agrees();
        }
    }
}

/// Tiles of 64 by 64, for large products.
#[test]
fn products_of_many_large_tiles() {
    let batch = vec![40];
    let [activated, twice] = [Epilogue::Activated, Epilogue::Twice];
    Product { batch: batch.clone(), finish: activated, ..Product::plain([65, 70, 17]) }.assert_agrees();
    let layouts = [Layout::Transposed; 2];
    Product { batch: batch.clone(), finish: twice, layouts, ..Product::plain([127, 66, 20]) }.assert_agrees();
    for precision in [Precision::Bf16, Precision::Bf16x3, Precision::Bf16x6] {
        Product { batch: batch.clone(), precision, ..Product::plain([65, 128, 17]) }.assert_agrees();
    }
}

/// Tiles of 128 by 128, for very large products with little padding.
#[test]
fn products_of_many_largest_tiles() {
    let batch = vec![256];
    let layouts = [Layout::Transposed, Layout::Plain];
    Product { batch: batch.clone(), layouts, finish: Epilogue::Twice, ..Product::plain([128, 101, 16]) }
        .assert_agrees();
    let layouts = [Layout::Strided, Layout::OneColumn];
    Product { batch, layouts, finish: Epilogue::Activated, ..Product::plain([97, 128, 13]) }.assert_agrees();
}

#[test]
fn rounded_products() {
    for precision in [Precision::Bf16, Precision::Bf16x3, Precision::Bf16x6] {
        for (sides, layouts) in [
            ([17, 33, 17], [Layout::Plain, Layout::Transposed]),
            ([64, 64, 40], [Layout::Transposed, Layout::Plain]),
            ([33, 32, 700], [Layout::Plain, Layout::Plain]),
        ] {
            Product { precision, layouts, finish: Epilogue::Activated, ..Product::plain(sides) }
                .assert_agrees();
        }
    }
    let to = [Some(DType::BF16), Some(DType::F16)];
    for rounded in [to, [to[1], None], [None, to[0]]] {
        for sides in [[33, 40, 20], [5, 40, 90]] {
            Product { rounded, ..Product::plain(sides) }.assert_agrees();
        }
    }
}
