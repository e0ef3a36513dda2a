package kvtier

// #include "shim.h"
import "C"

import "unsafe"

// Policy says who leaves first, of objects that the program keeps itself. It needs no runtime, and any
// goroutine may use it.
type Policy struct{ owner }

// PolicyOptions may all be zero.
type PolicyOptions struct {
	Capacity   int // units that there is room for
	LogEntries int
	Holes      bool // objects leave before those that continue them
}

// OpenPolicy opens a policy by its spec, such as "arc" or "qos(inner=s3fifo)".
func OpenPolicy(spec string, o PolicyOptions) (*Policy, error) {
	var raw C.handle
	var flags C.uint64_t
	if o.Holes {
		flags = C.KVT_POLICY_HOLES
	}
	s, n := text(spec)
	err := check("policy",
		C.policy_open(s, n, C.uint64_t(o.Capacity), C.uint64_t(o.LogEntries), flags, &raw))
	if err != nil {
		return nil, err
	}
	p := &Policy{}
	p.raw.Store(uint64(raw))
	return p, nil
}

// Close closes it.
func (p *Policy) Close() error {
	return p.shut("policy close", func(h C.handle) C.outcome { return C.policy_close(h) })
}

// Object is one to be inserted.
type Object struct {
	ID, Units uint64
	// Parent is the object that it continues, if HasParent.
	Parent    uint64
	HasParent bool
}

// Insert adds objects, all or none. nowNs is the program's monotonic clock, or 0 in every call.
func (p *Policy) Insert(nowNs int64, objects ...Object) error {
	if len(objects) == 0 {
		return nil
	}
	rows := make([]C.kvt_policy_object_t, len(objects))
	for i, o := range objects {
		rows[i].id = C.uint64_t(o.ID)
		rows[i].units = C.uint64_t(o.Units)
		if o.HasParent {
			rows[i].parent = C.uint64_t(o.Parent)
			rows[i].flags = C.KVT_OBJECT_HAS_PARENT
		}
	}
	return check("insert", C.policy_insert(p.get(), C.int64_t(nowNs), &rows[0], C.uint64_t(len(rows))))
}

// Lookup counts a use of a path of objects, and says how many from the first on are there.
func (p *Policy) Lookup(nowNs int64, ids ...uint64) (int, error) {
	if len(ids) == 0 {
		return 0, nil
	}
	var n C.uint64_t
	err := check("lookup", C.policy_lookup(p.get(), C.int64_t(nowNs),
		(*C.uint64_t)(unsafe.Pointer(&ids[0])), C.uint64_t(len(ids)), &n))
	return int(n), err
}

// Victim is an object that left.
type Victim struct{ ID, Units uint64 }

// Evict lets objects leave until so many units are free, at most `most` of them; what is still short is
// no error.
func (p *Policy) Evict(nowNs int64, units uint64, most int) (victims []Victim, short uint64, err error) {
	rows := make([]C.kvt_policy_victim_t, most+1) // one more: never an empty array
	var n, missing C.uint64_t
	err = check("evict", C.policy_evict(p.get(), C.int64_t(nowNs), C.uint64_t(units), &rows[0],
		C.uint64_t(most), &n, &missing))
	if err != nil {
		return nil, 0, err
	}
	for _, r := range rows[:n] {
		victims = append(victims, Victim{uint64(r.id), uint64(r.units)})
	}
	return victims, uint64(missing), nil
}

// Switch goes on with another policy on the same objects.
func (p *Policy) Switch(spec string) error {
	s, n := text(spec)
	return check("switch", C.policy_switch(p.get(), s, n))
}

// Spec is the policy's spec in canonical form.
func (p *Policy) Spec() (string, error) {
	to := make([]byte, 8192) // longer than any
	var n C.uint64_t
	err := check("spec", C.policy_spec(p.get(), (*C.char)(unsafe.Pointer(&to[0])),
		C.uint64_t(len(to)), &n))
	return string(to[:n]), err
}
