//! Ranks of a distributed training. A Python object exchanges the messages.

use std::fmt;
use std::sync::Arc;

use ortrain::distributed::{
    Collective, Communicator, Control, DataParallel, Operand, Pending, Reduction, Strategy,
};
use ortrain::{Error, HOST, Result};
use pyo3::prelude::*;

use crate::error::raise;

/// Communicator with a Python object that exchanges the messages: `Communicator` of `ortrain.trainer._mpi`.
struct PyCommunicator {
    object: Py<PyAny>,
    rank: usize,
    size: usize,
    allows_threads: bool,
}

impl fmt::Debug for PyCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PyCommunicator(rank {} of {})", self.rank, self.size)
    }
}

impl PyCommunicator {
    fn new(object: &Bound<'_, PyAny>) -> PyResult<PyCommunicator> {
        let rank = object.getattr("rank")?.extract()?;
        let size = object.getattr("size")?.extract()?;
        let allows_threads = object.getattr("allows_threads")?.extract()?;
        Ok(PyCommunicator { object: object.clone().unbind(), rank, size, allows_threads })
    }
}

/// Converts an exception of the Python object to an error.
fn to_error(py: Python<'_>, error: &PyErr) -> Error {
    Error::Communication(error.value(py).to_string())
}

/// Returns the address, the number of elements and the name of the element type of an operand.
fn describe(operand: &Operand) -> Result<(usize, usize, String)> {
    let memory = operand.memory().host().ok_or_else(|| {
        let device = operand.memory().device();
        Error::Communication(format!("MPI exchanges host memory only, not memory of {device}"))
    })?;
    let address = memory.as_ptr().expose_provenance() + operand.offset();
    Ok((address, operand.len(), operand.dtype().to_string()))
}

impl Communicator for PyCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn reaches(&self, device: &str) -> bool {
        device == HOST
    }

    fn allows_threads(&self) -> bool {
        self.allows_threads
    }

    fn start(&self, collective: Collective) -> Result<Box<dyn Pending>> {
        collective.check(self.rank, self.size)?;
        let operand = describe(collective.operand())?;
        let started = Python::attach(|py| {
            let object = self.object.bind(py);
            let started = match &collective {
                Collective::AllReduce { reduction, .. } => {
                    let reduction = if *reduction == Reduction::Sum { "sum" } else { "max" };
                    object.call_method1("all_reduce", (operand, reduction))
                }
                Collective::ReduceScatter { counts, result, .. } => {
                    let result = describe(result)?;
                    object.call_method1("reduce_scatter", (operand, counts.clone(), result))
                }
                Collective::AllGather { counts, .. } => {
                    object.call_method1("all_gather", (operand, counts.clone()))
                }
                Collective::Broadcast { root, .. } => object.call_method1("broadcast", (operand, *root)),
                Collective::Send { to, .. } => object.call_method1("send", (operand, *to)),
                Collective::Receive { from, .. } => object.call_method1("receive", (operand, *from)),
            };
            started.map(Bound::unbind).map_err(|error| to_error(py, &error))
        })?;
        Ok(Box::new(PyPending { started: Some(started), _collective: collective }))
    }

    fn group(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        Python::attach(|py| {
            let group = self.object.bind(py).call_method1("group", (ranks.to_vec(),));
            let group = group.and_then(|object| PyCommunicator::new(&object));
            Ok(Arc::new(group.map_err(|error| to_error(py, &error))?) as Arc<dyn Communicator>)
        })
    }

    fn abort(&self, sentence: &str) {
        // A failure to end the job leaves nothing to do.
        let _ =
            Python::attach(|py| self.object.bind(py).call_method1("abort", (sentence,)).map(Bound::unbind));
    }
}

/// Handle of a started collective. It holds the memory of the operands.
struct PyPending {
    started: Option<Py<PyAny>>,
    _collective: Collective,
}

impl PyPending {
    fn finish(&mut self) -> Result<()> {
        let Some(started) = self.started.take() else { return Ok(()) };
        Python::attach(|py| match started.bind(py).call_method0("wait") {
            Ok(_) => Ok(()),
            Err(error) => Err(to_error(py, &error)),
        })
    }
}

impl Pending for PyPending {
    fn wait(mut self: Box<Self>) -> Result<()> {
        self.finish()
    }
}

impl Drop for PyPending {
    fn drop(&mut self) {
        // The library may still write to the memory, and an error has no receiver.
        let _ = self.finish();
    }
}

/// Agreement of all ranks before each training step.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct RankControl {
    pub(crate) control: Arc<Control>,
}

#[pymethods]
impl RankControl {
    #[new]
    fn new(communicator: &Bound<'_, PyAny>) -> PyResult<RankControl> {
        let communicator = Arc::new(PyCommunicator::new(communicator)?);
        Ok(RankControl { control: Arc::new(Control::new(communicator)) })
    }

    /// Returns the number of exchanges that this rank has taken part in.
    fn exchange_count(&self) -> u64 {
        self.control.exchange_count()
    }

    /// Tells all ranks that this rank has failed in the current step.
    fn failed(&self, py: Python<'_>, sentence: &str) -> PyResult<()> {
        py.detach(|| self.control.failed(sentence)).map_err(raise)
    }

    /// Tells all ranks that this rank trains no more, and waits until all ranks have left.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.control.leave()).map_err(raise)
    }
}

/// Ranks of a session, as Python passes them: the control, the communicator of the data, the number of the session, the
/// use of the gradients, and true if sums overlap with the backward pass.
pub(crate) type Ranks<'py> = (Bound<'py, RankControl>, Bound<'py, PyAny>, u32, String, bool);

/// Converts the ranks of a session.
pub(crate) fn data_parallel(
    (control, data, session, strategy, overlaps): Ranks<'_>,
) -> PyResult<DataParallel> {
    let data = Arc::new(PyCommunicator::new(&data)?);
    let strategy = match strategy.as_str() {
        "zero" => Strategy::Zero,
        "adasum" => Strategy::Adasum,
        _ => Strategy::AllReduce,
    };
    let ranks = DataParallel::new(control.get().control.clone(), data, session).overlapping(overlaps);
    ranks.with_strategy(strategy).map_err(raise)
}
