//! Trace of runs, call by call.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ortrain_program::{Copied, Executable, Observer, Program};

use crate::exec::profile::{Kernels, to_json_string};

/// Maximum number of recorded calls, so that a process that runs for weeks does not exhaust its memory.
const MAX_CALLS: usize = 1_000_000;

/// One call.
#[derive(Debug)]
struct Event {
    /// Session for a run, or Node for a part of a run.
    category: &'static str,
    kind: &'static str,
    node: Arc<str>,
    shapes: String,
    kernel: String,
    flops: u64,
    bytes: u64,
    start: Duration,
    time: Duration,
}

/// Recorder of the events of runs.
#[derive(Debug)]
pub(crate) struct Trace {
    origin: Instant,
    events: Vec<Event>,
    kernels: Kernels,
    host: Arc<str>,
}

impl Trace {
    pub(crate) fn new() -> Trace {
        Trace { origin: Instant::now(), events: Vec::new(), kernels: Kernels::default(), host: "".into() }
    }

    fn add(&mut self, start: Instant, end: Instant, event: impl FnOnce() -> Event) {
        if self.events.len() < MAX_CALLS {
            let (start, time) = (start.saturating_duration_since(self.origin), end - start);
            self.events.push(Event { start, time, ..event() });
        }
    }

    /// Records the end of a run.
    pub(crate) fn record_run(&mut self, start: Instant, end: Instant) {
        let node = self.host.clone();
        self.add(start, end, || Event { category: "Session", ..empty_event("model_run", node) });
    }

    /// Returns the calls as a list in the Chrome trace format: `cat`, `pid`, `tid`, `dur`, `ts`, `ph`, `name`
    /// and `args`, with times in microseconds.
    pub(crate) fn to_json(&self) -> String {
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        let process = std::process::id();
        let mut out = String::from("[");
        for (at, event) in self.events.iter().enumerate() {
            let name = match &*event.node {
                "" => event.kind.to_owned(),
                node => format!("{} {node}", event.kind),
            };
            let _ = write!(
                out,
                "{}\n{{\"cat\":{},\"pid\":{process},\"tid\":{},\"dur\":{:.3},\"ts\":{:.3},\"ph\":\"X\",\"name\":{},\
                 \"args\":{{",
                if at == 0 { "" } else { "," },
                to_json_string(event.category),
                u8::from(event.category == "Node"),
                micros(event.time),
                micros(event.start),
                to_json_string(&name),
            );
            if event.category == "Node" {
                let [kind, node, shapes, kernel] =
                    [event.kind, &event.node, &event.shapes, &event.kernel].map(to_json_string);
                let (flops, bytes) = (event.flops, event.bytes);
                let _ = write!(
                    out,
                    "\"kind\":{kind},\"node\":{node},\"shapes\":{shapes},\"kernel\":{kernel},\"flops\":{flops},\
                     \"bytes\":{bytes}"
                );
            }
            out.push_str("}}");
        }
        out.push_str("\n]\n");
        out
    }
}

/// Creates an event without details.
fn empty_event(kind: &'static str, node: Arc<str>) -> Event {
    Event {
        category: "Node",
        kind,
        node,
        shapes: String::new(),
        kernel: String::new(),
        flops: 0,
        bytes: 0,
        start: Duration::ZERO,
        time: Duration::ZERO,
    }
}

impl Observer for Trace {
    fn begins(&mut self, executable: &dyn Executable) {
        self.kernels.add(executable);
    }

    fn instruction(&mut self, program: &Program, index: usize, start: Instant, end: Instant) {
        let kernels = std::mem::take(&mut self.kernels);
        self.add(start, end, || {
            let scheduled = &program.instructions[index];
            let cost = scheduled.instruction.cost(program);
            Event {
                shapes: scheduled.instruction.describe_sizes(),
                kernel: kernels.of(program, index),
                flops: cost.flops,
                bytes: cost.bytes,
                ..empty_event(scheduled.instruction.name(), scheduled.node.clone())
            }
        });
        self.kernels = kernels;
    }

    fn host(&mut self, node: &str, start: Instant, end: Instant) {
        self.add(start, end, || empty_event("Host", node.into()));
    }

    fn copied(&mut self, direction: Copied, bytes: usize, start: Instant, end: Instant) {
        let node = self.host.clone();
        self.add(start, end, || {
            let kind = match direction {
                Copied::Inputs => "Inputs",
                Copied::Outputs => "Outputs",
            };
            // Both read and written.
            Event { shapes: format!("{bytes} bytes"), bytes: 2 * bytes as u64, ..empty_event(kind, node) }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_max_calls() {
        let mut trace = Trace::new();
        let now = Instant::now();
        for _ in 0..=MAX_CALLS {
            trace.record_run(now, now);
        }
        assert_eq!(trace.events.len(), MAX_CALLS);
    }
}
