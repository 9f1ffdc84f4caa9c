//! Epilogues of products and convolutions.

use ortrain_expr::{Access, Builder, DType, Dims, Type, UnaryOp};
use ortrain_program::{BufferId, Load, Nest, Operand};

use super::test_program::TestProgramBuilder;

/// Epilogue of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Epilogue {
    Store,
    /// Adds a bias per column, and applies the hyperbolic tangent.
    Activated,
    /// Adds the product to the content of a plane.
    Accumulated,
    /// Stores the product, and twice the product with transposed axes.
    Twice,
}

pub(crate) const EPILOGUES: [Epilogue; 4] =
    [Epilogue::Store, Epilogue::Activated, Epilogue::Accumulated, Epilogue::Twice];

impl Epilogue {
    pub(crate) fn nest(self, builder: &mut TestProgramBuilder, dims: &[usize]) -> Nest {
        let len = dims.iter().product();
        let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, dims);
        let mut loads = vec![Load::Accumulator(DType::F32)];
        let mut b = Builder::new();
        let product = b.load(0, Type::F32);
        let (results, stores) = match self {
            Epilogue::Store => (vec![product], vec![contiguous(builder.result(len))]),
            Epilogue::Activated => {
                let columns = dims[dims.len() - 1];
                let bias = builder.random(columns);
                let access = Access::broadcast(DType::F32, &[columns], dims);
                loads.push(Load::Buffer(Operand { buffer: bias, access }));
                let bias = b.load(1, Type::F32);
                let sum = b.add(product, bias);
                (vec![b.unary(UnaryOp::Tanh, sum)], vec![contiguous(builder.result(len))])
            }
            Epilogue::Accumulated => {
                let state = builder.state(len);
                loads.push(Load::Buffer(contiguous(state)));
                let old = b.load(1, Type::F32);
                (vec![b.add(old, product)], vec![contiguous(state)])
            }
            Epilogue::Twice => {
                let mut transposed = contiguous(builder.result(len));
                let axis = dims.len() - 2;
                transposed.access.strides[axis] = 1;
                transposed.access.strides[axis + 1] = dims[axis] as isize;
                (vec![product, b.add(product, product)], vec![contiguous(builder.result(len)), transposed])
            }
        };
        Nest::elementwise(Dims::from_slice(dims), loads, b.finish(&results), stores)
    }
}
