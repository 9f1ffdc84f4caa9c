//! Initial values of the factors.

use ortrain_expr::random_bits;
use ortrain_graph::Tensor;
use ortrain_ops::training::{AdapterTarget, FactorShapes, LayerKind};

use super::{Init, LoraOptions};

/// Returns the factors of a new adapter. `index` is the number of the layer: each layer has its own random numbers.
pub(super) fn initial(
    target: &AdapterTarget,
    shapes: &FactorShapes,
    options: &LoraOptions,
    index: u64,
) -> [Tensor; 2] {
    let draw = Draw { seed: options.seed, stream: index };
    let zeros = |dims: &[usize]| Tensor::filled(target.dtype, dims, 0.0);
    let tensor = |dims: &[usize], number: &dyn Fn(u64) -> f32| {
        let elements: Vec<f32> = (0..dims.iter().product::<usize>() as u64).map(number).collect();
        Tensor::f32(dims, &elements).converted(target.dtype)
    };
    if target.kind == LayerKind::Embedding {
        // PEFT's choice for tables: the second factor is random for every method.
        return [zeros(&shapes.a), tensor(&shapes.b, &|i| draw.normal(i))];
    }
    let inputs: usize = shapes.a.iter().product::<usize>() / (target.directions * options.rank);
    let first = match options.init {
        Init::Kaiming => {
            let bound = 1.0 / (inputs.max(1) as f32).sqrt();
            tensor(&shapes.a, &|i| bound * (2.0 * draw.uniform(i) - 1.0))
        }
        Init::Gaussian => {
            let deviation = 1.0 / options.rank as f32;
            tensor(&shapes.a, &|i| deviation * draw.normal(i))
        }
        // The factors of these methods come from the weight.
        Init::Pissa | Init::Olora => zeros(&shapes.a),
    };
    [first, zeros(&shapes.b)]
}

/// Random numbers by index: a seed gives the same numbers on every machine.
struct Draw {
    seed: u64,
    stream: u64,
}

impl Draw {
    /// Returns a number from 0 to less than 1.
    fn uniform(&self, index: u64) -> f32 {
        (random_bits(self.seed, self.stream, index) >> 8) as f32 / (1 << 24) as f32
    }

    /// Returns a number of the standard normal distribution, by the method of Box and Muller.
    fn normal(&self, index: u64) -> f32 {
        let (radius, angle) = (1.0 - self.uniform(2 * index), self.uniform(2 * index + 1));
        let radius = (-2.0 * f64::from(radius).ln()).sqrt();
        (radius * (std::f64::consts::TAU * f64::from(angle)).cos()) as f32
    }
}
