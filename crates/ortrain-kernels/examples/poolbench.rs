#![allow(missing_docs, clippy::print_stdout)]
use ortrain_kernels::Pool;
use std::time::{Duration, Instant};
fn main() {
    let pool = Pool::new(2);
    for gap in [0u64, 2, 5, 10, 20, 50, 100, 300, 1000] {
        let mut t = vec![];
        for _ in 0..3000 {
            let s = Instant::now();
            pool.run(2, 2, &|_, _| {
                let s = Instant::now();
                while s.elapsed() < Duration::from_micros(2) {
                    std::hint::spin_loop()
                }
            });
            t.push(s.elapsed().as_nanos());
            let s = Instant::now();
            while s.elapsed() < Duration::from_micros(gap) {
                std::hint::spin_loop()
            }
        }
        t.sort();
        println!("gap {gap:4} us: two tasks of 2 us: min {:5} p50 {:5} p90 {:6} ns", t[0], t[1500], t[2700]);
    }
}
