//! Every attribute of every operator has a limit. With extreme numbers, a node returns an error or a correct
//! result, quickly and with little memory.
//!
//! Operators, their versions and their attributes are discovered by probing, so new operators are tested
//! automatically. The nodes run in separate processes, because excessive memory use ends a process.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeSet;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ortrain_graph::{Attr, AttrError, DType, Graph, Tensor, ValueType};
use ortrain_ops::passes::{differentiate::backpropagate, infer::infer, versions::upgrade};
use ortrain_ops::{Error, OpError, Registry, Role, Specialiser};
use ortrain_program::{Bindings, GradientMode, InputView, RunContext, Scalars, ScheduleExecutor, Workspace};

/// Maximum additional memory of a node, in bytes.
const MAX_MEMORY_BYTES: usize = 64 << 20;

/// Maximum time of a node: one second in a release build, more here without optimization and beside other
/// tests.
const MAX_NODE_TIME: Duration = Duration::from_secs(5);

/// Maximum time of a process at one node before it counts as hanging.
const HANG_TIMEOUT: Duration = Duration::from_secs(20);

/// Extreme numbers; their negatives are used, too.
const EXTREME_NUMBERS: [i64; 3] = [1 << 31, 1 << 40, 1 << 62];

/// Number of processes.
const SHARDS: usize = 2;

/// Maximum number of attributes of a node that are changed in pairs.
const MAX_PAIRED: usize = 8;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Allocator with a limit.
struct Limited;

#[allow(unsafe_code)]
// SAFETY: every call is forwarded unchanged to the system's allocator, or refused.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        if live.saturating_add(layout.size()) > LIMIT.load(Ordering::Relaxed) {
            LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's guarantees are the requirements of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        if live.saturating_add(layout.size()) > LIMIT.load(Ordering::Relaxed) {
            LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
            return std::ptr::null_mut();
        }
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// Returns the quoted words in the sources of the operators, which include the names of all attributes.
fn quoted_words() -> BTreeSet<String> {
    fn read(folder: &Path, words: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                read(&path, words);
            } else {
                let text = std::fs::read_to_string(&path).unwrap();
                let is_name = |word: &&str| {
                    (1..40).contains(&word.len())
                        && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
                };
                words.extend(text.split('"').filter(is_name).map(str::to_owned));
            }
        }
    }
    let mut words = BTreeSet::new();
    read(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../ortrain-ops/src")), &mut words);
    words
}

fn prepared(mut graph: Graph) -> Result<Graph, Error> {
    upgrade(&mut graph)?;
    infer(&mut graph)?;
    Ok(graph)
}

/// Returns the attributes that a node reads, with their types. Every word is set to a value of an unsupported
/// type, and the node reports one error after the other.
fn attributes(sample: &Graph, words: &BTreeSet<String>) -> Vec<(String, &'static str)> {
    let own = &sample.nodes[0].attrs.0;
    let mut graph = sample.clone();
    for word in words {
        if !matches!(own.get(word), Some(Attr::Graph(_))) {
            graph.nodes[0].attrs.0.insert(word.clone(), Attr::Graph(Box::default()));
        }
    }
    let mut found = Vec::new();
    while let Err(Error::Node {
        source: OpError::Attr(AttrError::WrongKind { name, expected, .. }), ..
    }) = prepared(graph.clone())
    {
        let attrs = &mut graph.nodes[0].attrs.0;
        match own.get(&name) {
            Some(attr) => attrs.insert(name.clone(), attr.clone()),
            None => attrs.remove(&name),
        };
        found.push((name, expected));
        assert!(found.len() <= words.len(), "{found:?}");
    }
    found.sort_unstable();
    found
}

/// Returns variants of a sample with one or two changed numbers, each with a description of the change.
fn changed_graphs(sample: &Graph, words: &BTreeSet<String>) -> Vec<(String, Graph)> {
    let mut kinds = attributes(sample, words);
    kinds.retain(|(_, kind)| matches!(*kind, "INT" | "INTS" | "FLOAT" | "FLOATS"));
    let spatial = sample
        .inputs
        .first()
        .and_then(|&id| sample.value(id).ty.shape())
        .map_or(2, ortrain_graph::Shape::rank);
    let with = |graph: &mut Graph, (name, kind): &(String, &str), number: i64| {
        let there = match graph.nodes[0].attrs.0.get(name) {
            Some(Attr::Ints(list)) => list.len(),
            Some(Attr::Floats(list)) => list.len(),
            _ if name.contains("pad") => 2 * spatial.saturating_sub(2).max(1),
            _ => spatial.saturating_sub(2).max(1),
        };
        let attr = match *kind {
            "INT" => Attr::Int(number),
            "INTS" => Attr::Ints(vec![number; there]),
            "FLOAT" => Attr::Float(number as f32),
            _ => Attr::Floats(vec![number as f32; there]),
        };
        graph.nodes[0].attrs.0.insert(name.clone(), attr);
    };
    let mut cases = Vec::new();
    for number in EXTREME_NUMBERS.into_iter().flat_map(|number| [number, -number]) {
        for (k, first) in kinds.iter().enumerate() {
            let mut one = sample.clone();
            with(&mut one, first, number);
            if let Some(Attr::Ints(list)) = one.nodes[0].attrs.0.get(&first.0)
                && list.len() > 1
            {
                // Only the first element.
                let mut list = vec![1; list.len()];
                list[0] = number;
                let mut graph = sample.clone();
                graph.nodes[0].attrs.0.insert(first.0.clone(), Attr::Ints(list));
                cases.push((format!("{} begins with {number}", first.0), graph));
            }
            // Each pair of attributes gets one of the numbers, in turns: all three take minutes.
            for (j, second) in kinds.iter().enumerate().take(MAX_PAIRED).skip(k + 1) {
                if number != EXTREME_NUMBERS[(k + j) % EXTREME_NUMBERS.len()] {
                    continue;
                }
                let mut two = one.clone();
                with(&mut two, second, number);
                cases.push((format!("{} and {} are {number}", first.0, second.0), two));
            }
            cases.push((format!("{} is {number}", first.0), one));
        }
        // Numbers that are inputs, known before a run.
        for (k, &id) in sample.inputs.iter().enumerate() {
            let ty = &sample.value(id).ty;
            let Some(dtype @ (DType::I64 | DType::I32 | DType::F32)) = ty.dtype() else { continue };
            let dims = ty.shape().and_then(ortrain_graph::Shape::concrete).unwrap_or_else(|| vec![1]);
            for dims in [dims, vec![1], vec![2]] {
                let mut graph = sample.clone();
                let value = graph.value_mut(id);
                value.ty = ValueType::tensor(dtype, &dims);
                value.constant = Some(Tensor::filled(dtype, &dims, number as f64));
                graph.inputs.remove(k);
                cases.push((format!("input {k} is {dims:?} of {number}"), graph));
            }
        }
    }
    cases
}

/// Prepares and runs a graph, then its gradient. Stops at the first unsupported part.
fn attempt(graph: Graph) -> Option<()> {
    let mut graph = prepared(graph).ok()?;
    let mut inputs = Vec::new();
    for &id in &graph.inputs.clone() {
        let ty = graph.value(id).ty.clone();
        let dims = ty.shape().and_then(ortrain_graph::Shape::concrete).unwrap_or_else(|| vec![2]);
        inputs.push(Tensor::filled(ty.dtype()?, &dims, 1.0));
    }
    let dims = run(&graph, &inputs)?;
    let seeds: Vec<_> = graph.outputs.clone().into_iter().zip(dims).collect();
    let mut given = Vec::new();
    for (output, (dtype, dims)) in seeds {
        if dtype.is_float() {
            let seed = graph.add_value("seed", ValueType::tensor(dtype, &dims));
            given.push((output, seed));
            graph.inputs.push(seed);
            inputs.push(Tensor::filled(dtype, &dims, 1.0));
        }
    }
    let targets: Vec<_> = graph.inputs[..graph.inputs.len() - given.len()]
        .iter()
        .copied()
        .filter(|&id| graph.value(id).ty.dtype().is_some_and(DType::is_float))
        .collect();
    let found = backpropagate(&mut graph, &given, &targets).ok()?;
    graph.outputs = found.into_iter().flatten().collect();
    run(&graph, &inputs).map(drop)
}

/// Runs a graph and returns the types of its results.
fn run(graph: &Graph, inputs: &[Tensor]) -> Option<Vec<(DType, Vec<usize>)>> {
    let roles = vec![Role::User; graph.inputs.len()];
    let schedule = Specialiser::new(graph.clone(), roles).schedule(inputs).ok()?;
    let backend = ortrain::default_backend().ok()?;
    let mut work =
        Workspace::with_limit(backend.clone(), Some(MAX_MEMORY_BYTES / 2), 0).iteration_limit(1000);
    ScheduleExecutor::check(&schedule, &work).ok()?;
    let runner = ScheduleExecutor::within(backend, schedule.schedule().clone(), &work).ok()?;
    let given: Vec<InputView<'_>> = inputs.iter().map(InputView::from).collect();
    let mut types = Vec::new();
    let bindings = Bindings { planes: &[] };
    let (entry, scalars) = (GradientMode::Overwrite, Scalars::default());
    runner
        .run(RunContext::new(&bindings, &mut work, entry, scalars), &given, &mut |_, value| {
            types.push((value.dtype, value.dims.to_vec()));
            Ok(())
        })
        .ok()?;
    Some(types)
}

/// Runs all nodes with extreme numbers, one after the other; `progress` records the current node.
fn run_shard(shard: usize, skipped: usize, progress: &Path) {
    let mut progress =
        std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(progress).unwrap();
    let words = quoted_words();
    let mut count = 0;
    let mut slow = Vec::new();
    // Resources that all nodes share.
    let _ = ortrain::default_backend();
    for (k, definition) in Registry::standard().file_definitions().iter().enumerate() {
        if k % SHARDS != shard {
            continue;
        }
        for (version, sample) in definition.samples().into_iter().enumerate() {
            for (what, graph) in changed_graphs(&sample, &words) {
                count += 1;
                if count <= skipped {
                    continue;
                }
                let inputs = sample.inputs.len();
                let name = format!("{count} {} (sample {version}, {inputs} inputs): {what}", definition.name);
                progress.seek(SeekFrom::Start(0)).unwrap();
                progress.write_all(format!("{name:<200}\n").as_bytes()).unwrap();
                let start = Instant::now();
                LIMIT.store(LIVE.load(Ordering::Relaxed) + MAX_MEMORY_BYTES, Ordering::Relaxed);
                let _ = attempt(graph);
                LIMIT.store(usize::MAX, Ordering::Relaxed);
                if start.elapsed() > MAX_NODE_TIME {
                    slow.push(format!("{name} takes {:?}", start.elapsed()));
                }
            }
        }
    }
    for line in slow {
        println!("SLOW {line}");
    }
    println!("TRIED {count}");
}

/// Runs a process until it ends or aborts, and returns its report.
fn run_child_process(shard: usize, skipped: usize, progress: &Path) -> Result<String, String> {
    let name = "every_attribute_of_every_operator_has_a_limit";
    // Empty until the process reaches the node at which the previous one aborted.
    std::fs::write(progress, "").unwrap();
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env("ORTRAIN_LIMITS", format!("{shard} {skipped} {}", progress.display()))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let at = || std::fs::read_to_string(progress).unwrap_or_default();
    let (mut last, mut since) = (at(), Instant::now());
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            let mut text = String::new();
            process.stdout.take().unwrap().read_to_string(&mut text).unwrap();
            return if status.success() {
                Ok(text)
            } else {
                Err(format!("{} ends with {status}", at().trim()))
            };
        }
        let now = at();
        if now != last {
            (last, since) = (now, Instant::now());
        } else if since.elapsed() > HANG_TIMEOUT && !last.is_empty() {
            process.kill().unwrap();
            process.wait().unwrap();
            return Err(format!("{} does not end", last.trim()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn every_attribute_of_every_operator_has_a_limit() {
    if let Ok(told) = std::env::var("ORTRAIN_LIMITS") {
        let words: Vec<&str> = told.splitn(3, ' ').collect();
        return run_shard(words[0].parse().unwrap(), words[1].parse().unwrap(), Path::new(words[2]));
    }
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let shards = (0..SHARDS).map(|shard| {
        let folder = folder.clone();
        std::thread::spawn(move || {
            let progress = folder.path().join(format!("progress_{shard}"));
            let (mut skipped, mut faults, mut tried) = (0, Vec::new(), 0);
            loop {
                match run_child_process(shard, skipped, &progress) {
                    Ok(text) => {
                        let slow = text.lines().filter_map(|line| line.split("SLOW ").nth(1));
                        faults.extend(slow.map(str::to_owned));
                        let count = text.lines().find_map(|line| line.split("TRIED ").nth(1));
                        tried += count.unwrap().trim().parse::<usize>().unwrap();
                        return (faults, tried);
                    }
                    Err(fault) => {
                        let number = fault.split(' ').next().and_then(|word| word.parse().ok());
                        skipped = number.unwrap_or_else(|| panic!("{fault}"));
                        faults.push(fault);
                        assert!(faults.len() < 200, "{faults:#?}");
                    }
                }
            }
        })
    });
    let found: Vec<_> = shards.collect::<Vec<_>>().into_iter().map(|shard| shard.join().unwrap()).collect();
    let faults: Vec<String> = found.iter().flat_map(|(faults, _)| faults.clone()).collect();
    let tried: usize = found.iter().map(|(_, tried)| tried).sum();
    assert!(faults.is_empty(), "{} of {tried}: {faults:#?}", faults.len());
    // A much smaller number would mean that attributes are no longer found.
    assert!(tried > 10_000, "{tried} nodes");
}

/// The names of attributes are found.
#[test]
fn attributes_are_found_by_probing() {
    let words = quoted_words();
    let of = |name: &str| -> BTreeSet<String> {
        let definition = Registry::standard().find("", name).unwrap();
        let samples = definition.samples();
        samples.iter().flat_map(|sample| attributes(sample, &words)).map(|(name, _)| name).collect()
    };
    for (operator, names) in [
        (
            "AveragePool",
            &["auto_pad", "ceil_mode", "count_include_pad", "dilations", "kernel_shape", "pads", "strides"][..],
        ),
        ("TopK", &["axis", "largest", "sorted"]),
        ("Concat", &["axis"]),
    ] {
        let found = of(operator);
        for name in names {
            assert!(found.contains(*name), "{name} of {operator}: {found:?}");
        }
    }
}
