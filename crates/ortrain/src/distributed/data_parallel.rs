//! Ranks with a copy of the model and a part of each batch.

use std::sync::Arc;

use ortrain_graph::DType;
use ortrain_program::Memory;

use super::communicator::{Collective, Communicator, Operand, Reduction};
use super::control::Control;
use crate::{Error, Result};

/// Use of the gradients of several ranks.
///
/// ```
/// use ortrain::distributed::Strategy;
///
/// assert_eq!(Strategy::default(), Strategy::AllReduce);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strategy {
    /// Each rank has the complete optimizer state, and updates all weights with the mean of the gradients.
    #[default]
    AllReduce,
    /// ZeRO stage 1: each rank has the optimizer state of a part of the weights, updates this part with the mean of the
    /// gradients, and receives the other weights.
    ///
    /// Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
    Zero,
    /// Adasum: each rank computes the change of the weights from its own gradients. All ranks apply the Adasum of the
    /// changes. The number of ranks is a power of two.
    ///
    /// Source: Maleki et al., Scaling Distributed Training with Adaptive Summation, 2021.
    Adasum,
}

/// Ranks that train copies of a model, each on its own batches.
///
/// ```
/// use std::sync::Arc;
///
/// use ortrain::distributed::{Control, DataParallel, ThreadCommunicator};
///
/// let rank = Arc::new(ThreadCommunicator::create(1).remove(0));
/// let ranks = DataParallel::new(Arc::new(Control::new(rank.clone())), rank, 0);
/// assert_eq!((ranks.rank(), ranks.size()), (0, 1));
/// ```
#[derive(Clone, Debug)]
pub struct DataParallel {
    control: Arc<Control>,
    data: Arc<dyn Communicator>,
    session: u32,
    strategy: Strategy,
    overlaps: bool,
}

impl DataParallel {
    /// Creates the ranks of a session. `session` is the number of the session in the order of creation, which is the same
    /// on all ranks.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use ortrain::distributed::{Control, DataParallel, Strategy, ThreadCommunicator};
    ///
    /// let [control, data] = [0, 0].map(|rank| Arc::new(ThreadCommunicator::create(2).remove(rank)));
    /// let ranks = DataParallel::new(Arc::new(Control::new(control)), data, 0);
    /// assert_eq!((ranks.strategy(), ranks.overlaps()), (Strategy::AllReduce, false));
    /// ```
    #[must_use]
    pub fn new(control: Arc<Control>, data: Arc<dyn Communicator>, session: u32) -> DataParallel {
        DataParallel { control, data, session, strategy: Strategy::default(), overlaps: false }
    }

    /// Sets the use of the gradients.
    ///
    /// # Errors
    /// For Adasum, if the number of ranks is no power of two.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use ortrain::distributed::{Control, DataParallel, ThreadCommunicator};
    /// use ortrain::distributed::Strategy;
    ///
    /// let rank = Arc::new(ThreadCommunicator::create(3).remove(0));
    /// let ranks = DataParallel::new(Arc::new(Control::new(rank.clone())), rank, 0);
    /// let error = ranks.with_strategy(Strategy::Adasum).unwrap_err().to_string();
    /// assert_eq!(error, "Adasum needs 2, 4, 8, ... ranks, got 3");
    /// ```
    pub fn with_strategy(self, strategy: Strategy) -> Result<DataParallel> {
        if strategy == Strategy::Adasum && !self.size().is_power_of_two() {
            return Err(Error::Argument(format!("Adasum needs 2, 4, 8, ... ranks, got {}", self.size())));
        }
        Ok(DataParallel { strategy, ..self })
    }

    /// Selects if gradients are summed while the backward pass still computes others. The results have the same bits. The
    /// selection has no effect with Adasum, and if the communicator allows no threads.
    #[must_use]
    pub fn overlapping(self, overlaps: bool) -> DataParallel {
        DataParallel { overlaps, ..self }
    }

    /// Returns true if gradients are summed while the backward pass still computes others.
    #[must_use]
    pub fn overlaps(&self) -> bool {
        self.overlaps && self.strategy != Strategy::Adasum && self.data.allows_threads()
    }

    /// Returns the communicator of the gradients.
    pub(crate) fn data(&self) -> &Arc<dyn Communicator> {
        &self.data
    }

    /// Returns the use of the gradients.
    #[must_use]
    pub fn strategy(&self) -> Strategy {
        self.strategy
    }

    /// Returns the index of this rank among the ranks with a part of the batch.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.data.rank()
    }

    /// Returns the number of ranks with a part of the batch.
    #[must_use]
    pub fn size(&self) -> usize {
        self.data.size()
    }

    /// Returns the exchange before each step.
    #[must_use]
    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    pub(crate) fn session(&self) -> u32 {
        self.session
    }

    /// Checks that the ranks can exchange planes of these types on a device.
    pub(crate) fn check(&self, device: &str, dtypes: impl IntoIterator<Item = DType>) -> Result<()> {
        if !self.data.reaches(device) {
            return Err(Error::Unreachable { device: device.into(), size: self.size() });
        }
        match dtypes.into_iter().find(|dtype| !matches!(dtype, DType::F32 | DType::F64)) {
            None => Ok(()),
            Some(dtype) => Err(Error::Argument(format!(
                "weights of {dtype} cannot be trained on {} ranks, which sum gradients of float32 and float64 only; \
                 train float32 weights with mixed precision",
                self.size()
            ))),
        }
    }

    /// Replaces the elements of a plane by their sums over all ranks.
    pub(crate) fn sum(&self, plane: &Arc<Memory>, dtype: DType) -> Result<()> {
        let operand = Operand::new(plane, dtype, 0..plane.len() / dtype.size())?;
        self.data.run(Collective::AllReduce { operand, reduction: Reduction::Sum })
    }

    /// Copies the range of each rank in a plane to all ranks.
    pub(crate) fn gather(&self, plane: &Arc<Memory>, dtype: DType, counts: Vec<usize>) -> Result<()> {
        let operand = Operand::new(plane, dtype, 0..plane.len() / dtype.size())?;
        self.data.run(Collective::AllGather { operand, counts })
    }

    /// Exchanges the elements of a plane with another rank.
    pub(crate) fn exchange(
        &self,
        own: &Arc<Memory>,
        received: &Arc<Memory>,
        dtype: DType,
        other: usize,
    ) -> Result<()> {
        let elements = 0..own.len() / dtype.size();
        let operand = Operand::new(received, dtype, elements.clone())?;
        let receive = self.data.start(Collective::Receive { operand, from: other })?;
        let operand = Operand::new(own, dtype, elements)?;
        let send = self.data.start(Collective::Send { operand, to: other })?;
        receive.wait()?;
        send.wait()
    }

    /// Replaces numbers by their sums over all ranks.
    pub(crate) fn sum_numbers(&self, values: &mut [f64]) -> Result<()> {
        let memory = Arc::new(Memory::new(size_of_val(values)));
        memory.write(0, bytemuck::cast_slice(values))?;
        self.sum(&memory, DType::F64)?;
        memory.read(0, bytemuck::cast_slice_mut(values))?;
        Ok(())
    }

    /// Returns true if a condition holds on all ranks.
    pub(crate) fn all(&self, condition: bool) -> Result<bool> {
        let mut failures = [f64::from(u8::from(!condition))];
        self.sum_numbers(&mut failures)?;
        Ok(failures == [0.0])
    }

    /// Returns the means of numbers over all ranks.
    pub(crate) fn mean(&self, mut values: Vec<f64>) -> Result<Vec<f64>> {
        self.sum_numbers(&mut values)?;
        Ok(values.into_iter().map(|sum| sum / self.size() as f64).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distributed::ThreadCommunicator;

    #[test]
    fn weights_of_half_precision_are_refused() {
        let rank = Arc::new(ThreadCommunicator::create(1).remove(0));
        let ranks = DataParallel::new(Arc::new(Control::new(rank.clone())), rank, 0);
        ranks.check("cpu", [DType::F32, DType::F64]).unwrap();
        let error = ranks.check("cpu", [DType::F32, DType::BF16]).unwrap_err().to_string();
        assert!(error.starts_with("weights of bfloat16 cannot be trained on 1 ranks"), "{error}");
        assert!(error.ends_with("train float32 weights with mixed precision"), "{error}");
    }
}
