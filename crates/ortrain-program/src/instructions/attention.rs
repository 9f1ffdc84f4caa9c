//! Instruction for attention.

use ortrain_expr::{DType, Dims, product_of_sizes};

use super::body::Body;
use crate::buffer::{Buffer, BufferId};
use crate::cost::{Traffic, nest_flops};
use crate::operand::{Load, Nest, Operand, Use, batched_matrix_dims, nest_buffers, nest_buffers_mut};

/// Attention, or the gradients of its operands, without a buffer for the scores.
///
/// For each batch index, the products of queries and keys pass through `scores`. The softmax over the keys follows, and
/// passes through `weights`. The results weight the values, which are summed over the keys. All arithmetic uses the
/// type of the operands, `F32` or `F64`.
///
/// The space of `scores`, `weights` and their gradients is `batch + [queries, keys]`. Each of these nests reads its
/// input as an accumulator and has one result without a store, which is passed on. The nests cannot fail.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Sizes of the batch axes, including the heads.
    pub batch: Dims,
    /// Number of queries.
    pub queries: usize,
    /// Number of keys and values.
    pub keys: usize,
    /// Number of elements of a query and of a key.
    pub size: usize,
    /// Number of elements of a value.
    pub width: usize,
    /// Queries, over `batch + [queries, size]`.
    pub q: Operand,
    /// Keys, over `batch + [keys, size]`.
    pub k: Operand,
    /// Values, over `batch + [keys, width]`.
    pub v: Operand,
    /// Epilogue of the product of a query and a key: scale, mask.
    pub scores: Nest,
    /// Epilogue of the softmax: dropout.
    pub weights: Nest,
    /// Computed results.
    pub pass: AttentionPass,
}

/// Results of an [`Attention`].
#[derive(Clone, Debug)]
pub enum AttentionPass {
    /// Weighted sums of the values. The nest is their epilogue, over `batch + [queries, width]`; its accumulator is a
    /// sum.
    Output(Box<Nest>),
    /// Gradients of the operands, from the gradient of the sums.
    Gradients(Box<AttentionGradients>),
}

/// Gradients of an [`Attention`]. Each required gradient has an epilogue with the gradient as accumulator.
#[derive(Clone, Debug)]
pub struct AttentionGradients {
    /// Gradient of the sums, over `batch + [queries, width]`.
    pub output_gradient: Operand,
    /// Map from the gradient of the weights to the gradient of the softmax. The softmax is the second accumulator.
    pub weights: Nest,
    /// Map from the softmax to the factor of the gradient of the weights. It differs from the softmax if the graph
    /// replaces NaN, from rows of only -inf, with zeros: this nest inserts the same zeros.
    pub softmax: Nest,
    /// Map from the gradient of the softmax's operand to the gradient of the product.
    pub scores: Nest,
    /// Epilogue of the gradient of the queries, over their space.
    pub q: Option<Nest>,
    /// Epilogue of the gradient of the keys.
    pub k: Option<Nest>,
    /// Epilogue of the gradient of the values.
    pub v: Option<Nest>,
}

/// Nest of an attention.
pub(crate) struct AttentionPart<'a> {
    pub(crate) nest: &'a Nest,
    /// Name in dumps.
    pub(crate) name: &'static str,
    /// Number of accumulators.
    accumulators: usize,
    /// True if the result is stored.
    stores: bool,
    /// Last two sizes of the space.
    sizes: [usize; 2],
}

impl Attention {
    /// Returns the operands, each with the last two sizes of its space.
    pub(crate) fn operands(&self) -> impl Iterator<Item = (&Operand, [usize; 2])> {
        let &Attention { queries, keys, size, width, .. } = self;
        let output_gradient = match &self.pass {
            AttentionPass::Output(_) => None,
            AttentionPass::Gradients(gradients) => Some((&gradients.output_gradient, [queries, width])),
        };
        [(&self.q, [queries, size]), (&self.k, [keys, size]), (&self.v, [keys, width])]
            .into_iter()
            .chain(output_gradient)
    }

    /// Returns the nests, in the order in which kernels take their buffers.
    pub(crate) fn parts(&self) -> Vec<AttentionPart<'_>> {
        let &Attention { queries, keys, size, width, .. } = self;
        let (of_q, of_k, of_v, scores) = ([queries, size], [keys, size], [keys, width], [queries, keys]);
        let inner = |nest, name, accumulators| AttentionPart {
            nest,
            name,
            accumulators,
            stores: false,
            sizes: scores,
        };
        let result = |nest, name, sizes| AttentionPart { nest, name, accumulators: 1, stores: true, sizes };
        let mut parts = vec![inner(&self.scores, "scores", 1), inner(&self.weights, "weights", 1)];
        match &self.pass {
            AttentionPass::Output(output) => parts.push(result(output, "output", [queries, width])),
            AttentionPass::Gradients(gradients) => {
                let AttentionGradients { weights, softmax, scores, q, k, v, .. } = &**gradients;
                parts.push(inner(weights, "gradient of weights", 2));
                parts.push(inner(softmax, "softmax of the gradient", 1));
                parts.push(inner(scores, "gradient of scores", 1));
                parts.extend(q.as_ref().map(|nest| result(nest, "gradient of q", of_q)));
                parts.extend(k.as_ref().map(|nest| result(nest, "gradient of k", of_k)));
                parts.extend(v.as_ref().map(|nest| result(nest, "gradient of v", of_v)));
            }
        }
        parts
    }

    /// Returns the buffers in the order in which kernels take them: operands, then loads and stores of each nest.
    #[must_use]
    pub fn buffers(&self) -> Vec<BufferId> {
        let mut buffers = Vec::new();
        Body::buffers(self, &mut |id, _| buffers.push(id));
        buffers
    }
}

impl Body for Attention {
    fn name(&self) -> &'static str {
        "Attention"
    }

    fn describe_sizes(&self) -> String {
        let Attention { batch, queries, keys, size, width, .. } = self;
        format!("{:?} {queries}x{keys} of {size} and {width}", batch.as_slice())
    }

    fn buffers(&self, each: &mut dyn FnMut(BufferId, Use)) {
        self.operands().for_each(|(operand, _)| each(operand.buffer, Use::Read));
        self.parts().iter().for_each(|part| nest_buffers(part.nest, each));
    }

    fn buffers_mut(&mut self, each: &mut dyn FnMut(&mut BufferId, Use)) {
        let Attention { q, k, v, scores, weights, pass, .. } = self;
        [q, k, v].into_iter().for_each(|operand| each(&mut operand.buffer, Use::Read));
        nest_buffers_mut(scores, each);
        nest_buffers_mut(weights, each);
        match pass {
            AttentionPass::Output(output) => nest_buffers_mut(output, each),
            AttentionPass::Gradients(gradients) => {
                let AttentionGradients {
                    output_gradient: gradient_operand,
                    weights,
                    softmax,
                    scores,
                    q,
                    k,
                    v,
                } = &mut **gradients;
                each(&mut gradient_operand.buffer, Use::Read);
                let results = [q, k, v].into_iter().flatten();
                [weights, softmax, scores]
                    .into_iter()
                    .chain(results)
                    .for_each(|nest| nest_buffers_mut(nest, each));
            }
        }
    }

    fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let buffer = |id: BufferId| &buffers[id.0 as usize];
        let dtype = buffer(self.q.buffer).dtype;
        let sizes = [self.queries, self.keys, self.size, self.width];
        if !matches!(dtype, DType::F32 | DType::F64) || self.batch.iter().chain(&sizes).any(|&size| size == 0)
        {
            return Some(format!(
                "attention of {dtype} with batch {:?} and sizes {sizes:?} is not supported",
                self.batch
            ));
        }
        for (operand, sizes) in self.operands() {
            let (dims, access) = (batched_matrix_dims(&self.batch, sizes), &operand.access);
            let fits = access.dtype == dtype
                && operand.validate(buffers).is_none()
                && access.strides.len() == dims.len();
            if !fits {
                return Some(format!("an operand's access does not fit {:?}", buffer(operand.buffer).label));
            }
            if let Some(fault) = operand.bounds_fault(&dims, "an operand") {
                return Some(fault);
            }
        }
        self.parts().iter().find_map(|part| {
            let AttentionPart { nest, name, accumulators, stores, sizes } = *part;
            if nest.dims != batched_matrix_dims(&self.batch, sizes)
                || nest.inner != 0
                || nest.segments.is_some()
                || nest.expr.can_fail()
            {
                return Some(format!("{name} has the wrong iteration space"));
            }
            let accumulator_loads = &nest.loads[..nest.num_accumulators()];
            if accumulator_loads.len() != accumulators
                || accumulator_loads.iter().any(|load| *load != Load::Accumulator(dtype))
            {
                return Some(format!("{name} has accumulators of the wrong type or order"));
            }
            if !stores && (nest.expr.outputs().len() != 1 || !nest.stores.is_empty()) {
                return Some(format!("{name} must have exactly 1 result and no stores"));
            }
            if let Some(Operand { buffer: id, .. }) =
                nest.operands().find(|operand| operand.validate(buffers).is_some())
            {
                return Some(format!("an access of {name} does not fit {:?}", buffer(*id).label));
            }
            if stores { nest.validate() } else { nest.operand_fault() }
        })
    }

    fn traffic(&self, traffic: &mut Traffic<'_>) {
        self.operands().for_each(|(operand, sizes)| {
            traffic.add_read_over(operand, &batched_matrix_dims(&self.batch, sizes));
        });
        self.parts().iter().for_each(|part| traffic.add_nest(part.nest));
    }

    fn flops(&self) -> u64 {
        let flops = self.parts().iter().map(|part| nest_flops(part.nest)).fold(0, u64::saturating_add);
        // Products: two for the output; for gradients the scores again, and one for each required gradient. Then the
        // softmax.
        let (sizes, widths, others) = match &self.pass {
            AttentionPass::Output(_) => (1, 1, 5),
            AttentionPass::Gradients(g) => {
                let (q, k, v) = (g.q.is_some(), g.k.is_some(), g.v.is_some());
                let gradient_products = u64::from(q || k);
                (1 + u64::from(q) + u64::from(k), u64::from(v) + gradient_products, 5 + 4 * gradient_products)
            }
        };
        let products = (sizes * self.size as u64).saturating_add(widths * self.width as u64);
        let each = products.saturating_mul(2).saturating_add(others);
        flops.saturating_add(
            product_of_sizes(batched_matrix_dims(&self.batch, [self.queries, self.keys]))
                .saturating_mul(each),
        )
    }
}
