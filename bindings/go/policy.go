package kvtier

// #include "shim.h"
import "C"

import "unsafe"

// Policy is an eviction policy for objects that the program keeps itself. It needs no runtime, and any
// goroutine may use it.
type Policy struct{ owner }

// PolicyOptions are the options of a policy. All may be zero.
type PolicyOptions struct {
	Capacity   int  // of the cache, in units; 0 = unknown
	LogEntries int  // evictions that the log keeps
	Holes      bool // parents may be evicted before their children
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

// Close closes the policy.
func (p *Policy) Close() error {
	return p.closeHandle("policy close", func(h C.handle) C.outcome { return C.policy_close(h) })
}

// Object is an object to insert.
type Object struct {
	ID, Units uint64
	// Parent is the object that this one continues, if HasParent is set.
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

// Lookup looks up a path of objects and touches the hits. It returns the number of hits before the first
// miss.
func (p *Policy) Lookup(nowNs int64, ids ...uint64) (int, error) {
	if len(ids) == 0 {
		return 0, nil
	}
	var n C.uint64_t
	err := check("lookup", C.policy_lookup(p.get(), C.int64_t(nowNs),
		(*C.uint64_t)(unsafe.Pointer(&ids[0])), C.uint64_t(len(ids)), &n))
	return int(n), err
}

// Victim is an evicted object.
type Victim struct{ ID, Units uint64 }

// Evict evicts objects until units are free, at most maxVictims. If too little can be evicted, it returns
// the missing units as the shortfall, which is no error.
func (p *Policy) Evict(nowNs int64, units uint64, maxVictims int) (victims []Victim, shortfall uint64, err error) {
	rows := make([]C.kvt_policy_victim_t, maxVictims+1) // not empty, so that it has an address
	var n, missing C.uint64_t
	err = check("evict", C.policy_evict(p.get(), C.int64_t(nowNs), C.uint64_t(units), &rows[0],
		C.uint64_t(maxVictims), &n, &missing))
	if err != nil {
		return nil, 0, err
	}
	for _, r := range rows[:n] {
		victims = append(victims, Victim{uint64(r.id), uint64(r.units)})
	}
	return victims, uint64(missing), nil
}

// Switch switches to another policy, which takes over the objects.
func (p *Policy) Switch(spec string) error {
	s, n := text(spec)
	return check("switch", C.policy_switch(p.get(), s, n))
}

// Spec returns the policy's spec in canonical form.
func (p *Policy) Spec() (string, error) {
	to := make([]byte, 8192) // longer than any spec
	var n C.uint64_t
	err := check("spec", C.policy_spec(p.get(), (*C.char)(unsafe.Pointer(&to[0])),
		C.uint64_t(len(to)), &n))
	return string(to[:n]), err
}
