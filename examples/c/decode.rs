// decode.rs – a sequence grows token by token in a cache, from Rust, without a crate: the structs of attnmask.h are
// written down here, and its functions are declared.
//
//     make lib
//     rustc -O examples/c/decode.rs -L build/lib -l attnmask -C link-arg=-Wl,-rpath,build/lib -o decode
//     ./decode

use std::ffi::{c_char, c_void, CStr};
use std::mem::{size_of, zeroed};

#[repr(C)]
#[derive(Clone, Copy)]
struct Array {
    data: *mut c_void,
    kind: i32,
    axes: i32,
    shape: [i64; 5],
    stride: [i64; 5],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Operand {
    given: i32,
    number: i64,
    array: *const Array,
}

#[repr(C)]
struct Mask {
    size: usize,
    low: Operand,
    high: Operand,
    offset: Operand,
    cum_seqlens_q: Array,
    cum_seqlens_k: Array,
    nodes: *const c_void,
    node_count: i64,
}

#[repr(C)]
struct CachedAttention {
    size: usize,
    query: Array,
    k_cache: Array,
    v_cache: Array,
    k_scale: Array,
    v_scale: Array,
    key: Array,
    value: Array,
    cu_seqlens_k_new: Array,
    cache_seqlens: Operand,
    block_table: Array,
    scale: f64,
    mask: *const Mask,
    chunk: i64,
    prefix: i64,
    terms: *const c_void,
    term_count: i64,
    out: Array,
    lse: Array,
}

#[repr(C)]
struct Message {
    text: [c_char; 512],
}

#[link(name = "attnmask")]
extern "C" {
    fn attnmask_cached_forward(call: *const CachedAttention, message: *mut Message) -> i32;
}

const FLOAT32: i32 = 11;

/// An array of four axes in C order; what the library only reads need not be mutable.
fn array(x: &[f32], shape: [i64; 4]) -> Array {
    assert_eq!(x.len() as i64, shape.iter().product::<i64>());
    let mut made: Array = unsafe { zeroed() }; // zeros: not given
    made.data = x.as_ptr() as *mut c_void;
    made.kind = FLOAT32;
    made.axes = 4;
    let mut stride = size_of::<f32>() as i64;
    for axis in (0..4).rev() {
        made.shape[axis] = shape[axis];
        made.stride[axis] = stride;
        stride *= shape[axis].max(1);
    }
    made
}

fn number(number: i64) -> Operand {
    Operand { given: 1, number, array: std::ptr::null() }
}

const HEADS: usize = 4;
const CHANNELS: usize = 32;
const LONGEST: usize = 16;

struct Cache {
    keys: Vec<f32>,
    values: Vec<f32>,
    tokens: i64,
}

impl Cache {
    fn new() -> Cache {
        let zeros = vec![0.0; LONGEST * HEADS * CHANNELS];
        Cache { keys: zeros.clone(), values: zeros, tokens: 0 }
    }

    /// Adds a token, and attends from it to all tokens so far.
    fn attend(&mut self, query: &[f32], key: &[f32], value: &[f32]) -> Result<Vec<f32>, String> {
        let one = [1, 1, HEADS as i64, CHANNELS as i64];
        let all = [1, LONGEST as i64, HEADS as i64, CHANNELS as i64];
        let mut out = vec![0.0; HEADS * CHANNELS];
        let mut message = Message { text: [0; 512] };
        let mut call: CachedAttention = unsafe { zeroed() };
        call.size = size_of::<CachedAttention>();
        call.query = array(query, one);
        call.k_cache = array(&self.keys, all);
        call.v_cache = array(&self.values, all);
        call.k_cache.data = self.keys.as_mut_ptr() as *mut c_void;
        call.v_cache.data = self.values.as_mut_ptr() as *mut c_void;
        call.key = array(key, one);
        call.value = array(value, one);
        call.cache_seqlens = number(self.tokens);
        call.out = array(&out, one);
        call.out.data = out.as_mut_ptr() as *mut c_void;
        let status = unsafe { attnmask_cached_forward(&call, &mut message) };
        if status != 0 {
            let text = unsafe { CStr::from_ptr(message.text.as_ptr()) };
            return Err(text.to_string_lossy().into_owned());
        }
        self.tokens += 1;
        Ok(out)
    }
}

/// Numbers that differ from token to token.
fn numbers(seed: i64) -> Vec<f32> {
    let of = |i: i64| ((seed * 7919 + i * 104729) % 2001 - 1000) as f64 / 500.0;
    (0..(HEADS * CHANNELS) as i64).map(|i| of(i) as f32).collect()
}

fn main() {
    let mut cache = Cache::new();
    for token in 0..=LONGEST as i64 {
        match cache.attend(&numbers(3 * token), &numbers(3 * token + 1), &numbers(3 * token + 2)) {
            Ok(out) => println!("{:.6} {:.6}", out[0], out[HEADS * CHANNELS - 1]),
            Err(text) => println!("token {token}: {text}"),
        }
    }
}
