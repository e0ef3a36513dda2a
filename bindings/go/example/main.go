// An example: stores the KV of a prompt on disk, reopens the store, plans, and loads the KV.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"kvtier"
)

const (
	layers, chunk, heads, run = 4, 16, 2, 64
	tokens                    = 96
	plane                     = tokens * heads * run
)

// transferOf describes tensors that lie one after the other: K and V of each layer.
func transferOf(b *kvtier.Buffer) (t kvtier.Transfer) {
	for i := 0; i < layers; i++ {
		t.K = append(t.K, kvtier.View{Buffer: b, Offset: 2 * i * plane, Heads: heads, RunBytes: run})
		t.V = append(t.V, kvtier.View{Buffer: b, Offset: (2*i + 1) * plane, Heads: heads, RunBytes: run})
	}
	return t
}

// storeOrLoad opens the store. It loads the prompt's KV if the plan says so, else computes and stores it.
func storeOrLoad(ctx context.Context, runtime *kvtier.Runtime, folder string, prompt []uint32) (err error) {
	store, err := runtime.OpenStore(fmt.Sprintf(
		`store(host=4MiB, disk=disk(path="%s", bytes=64MiB, segment=1MiB))`, folder))
	if err != nil {
		return err
	}
	defer func() {
		if e := store.Close(time.Minute); err == nil {
			err = e
		}
	}()
	layout, err := kvtier.LayoutGQA(layers, heads, run/2, kvtier.F16, chunk)
	if err != nil {
		return err
	}
	namespace, err := store.Namespace(kvtier.Identity{Model: "example", Weights: "1"}, layout)
	if err != nil {
		return err
	}
	defer namespace.Close()
	session, err := namespace.Session("example", 1)
	if err != nil {
		return err
	}
	defer session.Close()
	if err = session.Append(prompt...); err != nil {
		return err
	}
	plan, err := session.Plan(&kvtier.Cost{Alpha: 1e3, Beta: 1e6})
	if err != nil {
		return err
	}
	tensors, err := runtime.Buffer(2 * layers * plane)
	if err != nil {
		return err
	}
	defer tensors.Close()
	for _, step := range plan {
		fmt.Printf("  tokens %d to %d: %s\n", step.First, step.First+step.Tokens, step.StepKind)
		transfer := transferOf(tensors)
		if step.StepKind == kvtier.Load {
			transfer.Tokens = step.Tokens
			op, err := session.Get(transfer)
			if err != nil {
				return err
			}
			if _, err = op.Wait(ctx); err != nil {
				return err
			}
			for i, b := range tensors.Bytes() {
				if b != byte(i*31) {
					return fmt.Errorf("byte %d is %d, want %d", i, b, byte(i*31))
				}
			}
			fmt.Println("  loaded: every byte is equal")
			continue
		}
		for i := range tensors.Bytes() { // stands for the model
			tensors.Bytes()[i] = byte(i * 31)
		}
		transfer.Level = kvtier.Durable
		op, err := session.Put(transfer)
		if err != nil {
			return err
		}
		n, err := op.Wait(ctx)
		if err != nil {
			return err
		}
		fmt.Printf("  computed; %d tokens are durable\n", n)
	}
	return nil
}

// evict lets a policy choose victims among objects that the program keeps itself.
func evict() error {
	policy, err := kvtier.OpenPolicy("arc", kvtier.PolicyOptions{Capacity: 100})
	if err != nil {
		return err
	}
	defer policy.Close()
	for id := uint64(1); id <= 4; id++ {
		if err := policy.Insert(int64(id), kvtier.Object{ID: id, Units: 1}); err != nil {
			return err
		}
	}
	if _, err := policy.Lookup(5, 1); err != nil {
		return err
	}
	victims, _, err := policy.Evict(6, 2, 10)
	fmt.Println("  victims:", victims)
	return err
}

func main() {
	folder, err := os.MkdirTemp("", "kvtier-go-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder)
	runtime, err := kvtier.OpenRuntime(2)
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	prompt := make([]uint32, tokens)
	for i := range prompt {
		prompt[i] = uint32(i * i)
	}
	for _, title := range []string{"first run:", "after a restart:"} {
		fmt.Println(title)
		if err := storeOrLoad(ctx, runtime, folder+"/kv", prompt); err != nil {
			log.Panic(err)
		}
	}
	fmt.Println("a policy without a store:")
	if err := evict(); err != nil {
		log.Panic(err)
	}
	if err := runtime.Close(); err != nil {
		log.Panic(err)
	}
}
