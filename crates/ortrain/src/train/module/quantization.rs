//! Report of the quantized tensors of a module.

use ortrain_ops::training::{QuantizedTensor, quantized_tensors};

use super::Module;
use crate::{CheckpointState, Result};

impl Module {
    /// Returns the tensors of the evaluation model that are quantized, or of the training model if there is no evaluation
    /// model: scales, zero points, ranges, and for weights the share of the elements that are clipped.
    ///
    /// The list is empty for a model without quantized tensors.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// assert!(module.quantization(&state)?.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the state is nominal or of another module.
    pub fn quantization(&self, state: &CheckpointState) -> Result<Vec<QuantizedTensor>> {
        self.check_state(state)?;
        drop(state.parameters()?);
        let phase = self.eval.as_ref().unwrap_or(&self.train);
        let parameter = |name: &str| state.parameter(name).ok()?.to_tensor().ok();
        Ok(quantized_tensors(phase.executables.graph(), &parameter))
    }
}
